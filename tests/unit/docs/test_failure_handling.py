"""Test docs/failure-handling.md and docs/debugging.md against the code."""

import dataclasses
import inspect
import pkgutil
import re
import signal
from pathlib import Path

import pytest

from tandem.controlplane.control_orders import SILENT_S
from tandem.controlplane.environment import Environment
from tandem.controlplane.up_flag_map import FLAGS
from tandem.core.config import ClusterConfig, RouterSection, WorkerSection
from tandem.core.cpu_level import CpuLevel
from tandem.core.lease_timing import BEAT_S, LEASE_S, PROOF_OF_LIFE, STAND_S
from tandem.core.timeout_scale import PATIENCE, PATIENCE_VARIABLE
from tandem.kernels import backend, native
from tandem.router.admission.admission_controller import _LEAST_S, _MOST_S
from tandem.router.api.frontend import MAX_WAITING
from tandem.router.dispatch.retry_policy import BURST_S, LONGEST_OPEN_S, SECOND_CHANCE_S, Cause
from tandem.workercore.heartbeat import STACKS_SIGNAL
from tandem.workercore.inbox import MAX_BYTES, MAX_MESSAGES
from tests.unit.docs.operating import table

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "failure-handling.md").read_text()
LINKING = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


def figures(pattern: str) -> list[float]:
    """The groups of `pattern` as numbers; it is on the page once."""
    (found,) = re.findall(pattern, " ".join(PAGE.split()))
    return [float(one.replace(",", "")) for one in ([found] if isinstance(found, str) else found)]


def test_the_causes_are_those_of_the_retry_policy() -> None:
    table = PAGE.split("## Retry policy")[1].split("| cause |")[1].split("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE)) == set(Cause)


def test_the_limits_on_retries() -> None:
    section = RouterSection()
    assert figures(r"`max_attempts` \((\S+)\)") == [section.max_attempts]
    budget = [section.retry_burst, section.retry_ratio, section.retry_per_s]
    assert figures(r"`retry_burst` \((\S+)\), `retry_ratio` \((\S+)\), `retry_per_s` \((\S+)\)") == budget
    breaker = [section.breaker_failures, section.breaker_open_s]
    assert figures(r"`breaker_failures` \((\S+)\), `breaker_open_s` \((\S+) s\)") == breaker
    assert figures(r"failures within (\S+) s count once") == [BURST_S]
    assert figures(r"twice as long, (\S+) s at most") == [LONGEST_OPEN_S]
    assert figures(r"died\), (\S+) s after the failure, then (\S+) s") == [SECOND_CHANCE_S, 2 * SECOND_CHANCE_S]
    assert figures(r"the last `worker_wait_s` \((\S+) s\)") == [section.worker_wait_s]
    assert figures(r"`stall_s`, (\S+) s \|") == [section.stall_s]


def test_the_bounds_of_silence() -> None:
    given = dict(PROOF_OF_LIFE)
    pings_s = [given["grpc.keepalive_time_ms"] / 1000, given["grpc.keepalive_timeout_ms"] / 1000, LEASE_S]
    assert figures(r"asked after (\S+) s of silence, answered within (\S+) s \| .*? lock \| (\S+) s") == pings_s
    assert figures(r"event loops, every (\S+) s \| .*? ends \| (\S+) s") == [BEAT_S, STAND_S]
    assert figures(r"no answer to a probe for (\S+) s") == [SILENT_S]
    assert figures(r"up to (\S+) or (\S+) MiB") == [MAX_MESSAGES, MAX_BYTES >> 20]


def test_load_shedding() -> None:
    assert figures(r"more than (\S+) requests wait to be read") == [MAX_WAITING]
    assert figures(r"from (\S+) s to one minute") == [_LEAST_S]
    assert _MOST_S == 60.0


def test_other_pages_link_to_headings_that_exist() -> None:
    headings = {re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in re.findall(r"^#+ (.+)$", PAGE, re.M)}
    linked = {anchor for page in LINKING for anchor in re.findall(r"failure-handling\.md#([\w-]+)", page.read_text())}
    assert linked
    assert linked <= headings


DEBUGGING = (ROOT / "docs" / "debugging.md").read_text()
PLACES = sorted(set(re.findall(r"`\w+/tandem/([\w/]+)\.py:([\w.]+)`", DEBUGGING)))


def resolved(path: str, name: str) -> object:
    return pkgutil.resolve_name(f"tandem.{path.replace('/', '.')}:{name}")


@pytest.mark.parametrize(("path", "name"), PLACES, ids=[".".join(place) for place in PLACES])
def test_places_are_real(path: str, name: str) -> None:
    found = resolved(path, name)
    assert inspect.isfunction(found) or inspect.isclass(found) or name.isupper(), name


def test_places_of_the_way_are_functions() -> None:
    rows = table(DEBUGGING, "The way of a request")
    assert len(rows) > 8
    for _, place, _ in rows:
        path, _, name = place.strip("`").partition(".py:")
        assert inspect.isfunction(resolved(path.partition("/tandem/")[2], name)), place


def test_bounds_are_as_the_table_says() -> None:
    rows = table(DEBUGGING, "Time to stand")
    assert len(rows) > 5
    for _, place, usual in rows:
        path, _, name = place.strip("`").partition(".py:")
        assert resolved(path.partition("/tandem/")[2], name) == float(usual.split()[0]) * PATIENCE, place


def test_settings_that_follow_are_real() -> None:
    line = DEBUGGING.split("Settings that follow: ")[1].split(". ")[0]
    named = set(re.findall(r"`(\w+)`", line))
    kinds = (ClusterConfig, WorkerSection, RouterSection)
    assert len(named) > 3
    assert named <= {field.name for kind in kinds for field in dataclasses.fields(kind)}
    assert FLAGS["--patience"] == "patience"


def test_variables_are_read() -> None:
    read = {PATIENCE_VARIABLE, native.ENVIRONMENT_VARIABLE, backend.ENVIRONMENT_VARIABLE, "TANDEM_CPU_LEVEL"}
    assert set(re.findall(r"\b(TANDEM_\w+)", DEBUGGING)) == read
    assert set(re.findall(r"TANDEM_KERNELS=(\w+)", DEBUGGING)) <= set(backend.BACKENDS)
    assert set(re.findall(r"TANDEM_CPU_LEVEL=(\w+)", DEBUGGING)) <= {level.label for level in CpuLevel}


def test_the_hook_and_its_other_end_are_real() -> None:
    [hook] = set(re.findall(r"PYTHONBREAKPOINT=([\w.]+)", DEBUGGING))
    assert Environment.read({}).for_child(threads=1)["PYTHONBREAKPOINT"] == hook
    [module] = set(re.findall(r"python -m (tandem[\w.]+)", DEBUGGING))
    assert inspect.isfunction(pkgutil.resolve_name(f"{module}:main"))


def test_the_signal_for_stacks_is_the_one_that_ranks_take() -> None:
    [name] = set(re.findall(r"kill -(\w+)", DEBUGGING))
    assert signal.Signals[f"SIG{name}"] == STACKS_SIGNAL


def test_flags_of_pytest_are_ours() -> None:
    conftest = (ROOT / "tests" / "conftest.py").read_text()
    ours = set(re.findall(r'addoption\("(--[a-z-]+)"', conftest))
    lines = re.findall(r"pytest (tests/\S+) (.*)", DEBUGGING)
    assert len(lines) == 3
    for path, words in lines:
        assert (ROOT / path).exists(), path
        assert set(re.findall(r"--[a-z-]+", words)) <= ours, words


def test_it_stays_one_page() -> None:
    lines = DEBUGGING.splitlines()
    assert len(lines) <= 160
    assert [line for line in lines if len(line) > 120] == []
