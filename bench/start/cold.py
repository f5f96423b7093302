"""Starts of a whole cluster as a user meets them the first time, held to AVX2: cases, and what each took until ready.

A case is an environment and a Python. The cluster is what `clusterctl up` starts without flags beside the model: a
prefill and a decode worker, with KV memory by what is free.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from bench.report import ROOT
from tandem.controlplane.model_catalog import SMOLLM2
from tandem.controlplane.model_download import pull
from tandem.core.errors import UnavailableError
from tools.running_cluster import started, stop

NOWHERE = "/proc/nowhere"
"""A path that cannot be created, not even by root."""
COMPILES = "nothing compiled"
"""The only case in which a compiler runs."""
READY_LIMIT_S = {"tiny": 6.0, "SmolLM2": 10.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`set` and `unset` are variables of the environment; with `has_new_cache` the user's cache is an empty folder in
    each start. `python`: the interpreter with the Tandem that starts."""

    name: str
    set: dict[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()
    has_new_cache: bool = False
    python: str = sys.executable


@dataclass(frozen=True, slots=True)
class Took:
    """Seconds from the start of `up` until the cluster is ready, and of CPU time in all of its processes until then."""

    ready_s: float
    cpu_s: float


def smollm2() -> Path | None:
    """The model of that name, fetched once into `build/models`; None = it cannot be had here."""
    try:
        return pull(SMOLLM2, ROOT / "build" / "models")
    except UnavailableError:
        return None


def cases(folder: Path) -> tuple[Case, ...]:
    """All cases; their files lie below `folder`, made anew."""
    return (
        Case(name="warm"),
        Case(name="empty cache", has_new_cache=True),
        Case(name="no home", set={"HOME": NOWHERE}, unset=("XDG_CACHE_HOME", "XDG_STATE_HOME")),
        Case(name="read-only cache", set={"XDG_CACHE_HOME": NOWHERE}),
        Case(name="no compiler", set={"PATH": str(Path(sys.executable).parent)}, has_new_cache=True),
        Case(name=COMPILES, set={"TANDEM_NATIVE": "compile"}, has_new_cache=True),
        Case(name="wheel", unset=("PYTHONPATH",), python=_with_wheel(folder), has_new_cache=True),
    )


def took(case: Case, model: Path | None) -> Took:
    """Start a cluster with that model, None = the bundled one, and stop it when it is ready."""
    flags = ("--kv-memory", "auto", *(("--model", str(model)) if model else ()))
    unset = [word for name in case.unset for word in ("-u", name)]
    with tempfile.TemporaryDirectory(prefix="td-start-") as folder, tempfile.TemporaryDirectory() as cache:
        variables = case.set | ({"XDG_CACHE_HOME": cache} if case.has_new_cache else {})
        prefix = ["env", *unset, "TANDEM_CPU_LEVEL=avx2", *(f"{name}={value}" for name, value in variables.items())]
        began_s = time.perf_counter()
        with started(*flags, folder=Path(folder), prefix=prefix, python=case.python) as cluster:
            ready_s = time.perf_counter() - began_s
            cpu_s = _cpu_s(cluster.process.pid)
            stop(cluster)
    return Took(ready_s, cpu_s)


def _cpu_s(pid: int) -> float:
    """CPU seconds of a process, its descendants and those of them that ended."""
    up = psutil.Process(pid)
    return sum(sum(process.cpu_times()[:4]) for process in (up, *up.children(recursive=True)))


def _with_wheel(folder: Path) -> str:
    """Python of a new environment with Tandem's wheel alone; its dependencies are found in this one's folder, by a path
    without this one's own `.pth` files: nothing is fetched, and nothing of the checkout is imported."""
    wheels, home = folder / "wheels", folder / "environment"
    pip = ("-m", "pip", "--disable-pip-version-check", "--quiet")
    build = ("wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(wheels), str(ROOT))
    subprocess.run([sys.executable, *pip, *build], check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    python = str(home / "bin" / "python")
    (wheel,) = wheels.glob("*.whl")
    install = ("--python", python, "install", "--no-deps", "--no-index", str(wheel))
    subprocess.run([sys.executable, *pip, *install], check=True)
    packages = sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)})
    Path(packages, "dependencies.pth").write_text(sysconfig.get_path("purelib") + os.linesep)
    return python
