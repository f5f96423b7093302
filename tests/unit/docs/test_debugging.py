"""docs/debugging.md: its places, bounds, settings, variables and flags are those of the code."""

from __future__ import annotations

import dataclasses
import inspect
import pkgutil
import re
import signal
from pathlib import Path

import pytest

from tandem.controlplane.environment import Environment
from tandem.controlplane.flag_map import FLAGS
from tandem.core.config import ClusterConfig, RouterSection, WorkerSection
from tandem.core.cpu_level import CpuLevel
from tandem.core.timeout_scale import PATIENCE, PATIENCE_VARIABLE
from tandem.kernels import backend, native
from tandem.workercore.heartbeat_thread import STACKS_SIGNAL
from tests.unit.docs.operating import table

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "debugging.md").read_text()
PLACES = sorted(set(re.findall(r"`\w+/tandem/([\w/]+)\.py:([\w.]+)`", PAGE)))


def resolved(path: str, name: str) -> object:
    return pkgutil.resolve_name(f"tandem.{path.replace('/', '.')}:{name}")


@pytest.mark.parametrize(("path", "name"), PLACES, ids=[".".join(place) for place in PLACES])
def test_places_are_real(path: str, name: str) -> None:
    found = resolved(path, name)
    assert inspect.isfunction(found) or inspect.isclass(found) or name.isupper(), name


def test_places_of_the_way_are_functions() -> None:
    rows = table(PAGE, "The way of a request")
    assert len(rows) > 8
    for _, place, _ in rows:
        path, _, name = place.strip("`").partition(".py:")
        assert inspect.isfunction(resolved(path.partition("/tandem/")[2], name)), place


def test_bounds_are_as_the_table_says() -> None:
    rows = table(PAGE, "Time to stand")
    assert len(rows) > 5
    for _, place, usual in rows:
        path, _, name = place.strip("`").partition(".py:")
        assert resolved(path.partition("/tandem/")[2], name) == float(usual.split()[0]) * PATIENCE, place


def test_settings_that_follow_are_real() -> None:
    line = PAGE.split("Settings that follow: ")[1].split(". ")[0]
    named = set(re.findall(r"`(\w+)`", line))
    kinds = (ClusterConfig, WorkerSection, RouterSection)
    assert len(named) > 3
    assert named <= {field.name for kind in kinds for field in dataclasses.fields(kind)}
    assert FLAGS["--patience"] == "patience"


def test_variables_are_read() -> None:
    read = {PATIENCE_VARIABLE, native.ENVIRONMENT_VARIABLE, backend.ENVIRONMENT_VARIABLE, "TANDEM_CPU_LEVEL"}
    assert set(re.findall(r"\b(TANDEM_\w+)", PAGE)) == read
    assert set(re.findall(r"TANDEM_KERNELS=(\w+)", PAGE)) <= set(backend.BACKENDS)
    assert set(re.findall(r"TANDEM_CPU_LEVEL=(\w+)", PAGE)) <= {level.label for level in CpuLevel}


def test_the_hook_and_its_other_end_are_real() -> None:
    [hook] = set(re.findall(r"PYTHONBREAKPOINT=([\w.]+)", PAGE))
    assert Environment.read({}).for_child(threads=1)["PYTHONBREAKPOINT"] == hook
    [module] = set(re.findall(r"python -m (tandem[\w.]+)", PAGE))
    assert inspect.isfunction(pkgutil.resolve_name(f"{module}:main"))


def test_the_signal_for_stacks_is_the_one_that_ranks_take() -> None:
    [name] = set(re.findall(r"kill -(\w+)", PAGE))
    assert signal.Signals[f"SIG{name}"] == STACKS_SIGNAL


def test_flags_of_pytest_are_ours() -> None:
    conftest = (ROOT / "tests" / "conftest.py").read_text()
    ours = set(re.findall(r'addoption\("(--[a-z-]+)"', conftest))
    lines = re.findall(r"pytest (tests/\S+) (.*)", PAGE)
    assert len(lines) == 3
    for path, words in lines:
        assert (ROOT / path).exists(), path
        assert set(re.findall(r"--[a-z-]+", words)) <= ours, words


def test_it_stays_one_page() -> None:
    lines = PAGE.splitlines()
    assert len(lines) <= 160
    assert [line for line in lines if len(line) > 120] == []
