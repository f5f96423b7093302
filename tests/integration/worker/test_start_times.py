"""A worker's report of its own start agrees with a measurement from outside."""

import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tandem.core.clock import MonotonicClock
from tandem.core.start_times import StartPhase, process_started_s
from tests.integration.worker.alone import worker_of

HEARD_WITHIN_S = 2.0
"""The last word of the start."""
HOST = {"imports", "config", "ranks", "pool", "warm_up", "transfers", "registration", "weights"}
MODEL = {"torch", "kernels", "packing"}


def started(log: str) -> dict[str, float]:
    (line,) = [line for line in log.splitlines() if " worker started " in line]
    return {name: float(value) for name, value in re.findall(r"(\w+)_s=([\d.]+)", line)}


@pytest.mark.parametrize(
    ("settings", "more"),
    [({"engine": "sim"}, set()), ({}, MODEL), ({"tp": 2}, MODEL | {"group"})],
    ids=["sim", "model", "two ranks"],
)
async def test_a_worker_says_what_each_second_of_its_start_went_to(
    folder: Path, settings: dict[str, Any], more: set[str]
) -> None:
    clock = MonotonicClock()
    async with worker_of(folder, **{"tp": 1, **settings}) as worker:
        measured_s = worker.ready_s - process_started_s(clock, worker.process.pid)
        worker.process.send_signal(signal.SIGTERM)
    took = started((folder / "m0.log").read_text())
    total_s = took.pop("took")
    print(f"ready in {total_s:.2f} s of {measured_s:.2f} s: {took}")
    assert set(took) - {"compiling"} == HOST | more
    assert total_s == pytest.approx(sum(took.values()), abs=0.001 * len(took))
    assert measured_s - HEARD_WITHIN_S < total_s < measured_s
    assert worker.progress[-1].startswith("started in ")
    words = {phase: float(value) for phase, value in re.findall(r"(?::|,) ([\w ]+) ([\d.]+) s", worker.progress[-1])}
    # Phases of more than hundredths of a second; registering goes on while it is reported.
    long = {StartPhase[name.upper()]: value for name, value in took.items() if value > 0.01 and name != "registration"}
    assert long
    assert {phase: words.get(phase) for phase in long} == pytest.approx(long, abs=0.006)
    assert all(phase in worker.progress for phase in ("warming up", "registering"))


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")
async def test_what_compiling_took_is_not_counted_where_it_happened(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool of the simulated engine needs the code that moves KV; the cache is empty."""
    monkeypatch.setenv("TANDEM_NATIVE", "compile")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    async with worker_of(folder, tp=1, engine="sim") as worker:
        worker.process.send_signal(signal.SIGTERM)
        progress = worker.progress
    pool, compiling = StartPhase.POOL.value, StartPhase.COMPILING.value
    assert [text for text in progress if text in (pool, compiling)] == [pool, compiling, pool]
    took = started((folder / "m0.log").read_text())
    assert took["compiling"] > took["pool"], "a compiler takes seconds, a small pool none"
