"""CI's slice of `make proof NAME=transfer`: faults on the wire, TP pairings, workers killed and stopped.

Limits of time are the long run's to judge, on a machine that does nothing else.
"""

import asyncio
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from proof.transfer.plan import TRANSPORTS, Case, draw, faults_of, matrix
from proof.transfer.record import FULL_LENGTH, Record
from proof.transfer.strike_run import run_strikes
from proof.transfer.wire import Wire

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def is_quiet() -> Iterator[None]:
    """Every case has failures on purpose, which the log reports at length."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def wire(folder: Path) -> Iterator[Wire]:
    made = Wire(folder, folder / "sender.log")
    yield made
    made.close()


@pytest.mark.drawn(2)
@pytest.mark.parametrize("place", range(len(TRANSPORTS)), ids=TRANSPORTS)
def test_random_transfers_with_random_faults(wire: Wire, place: int) -> None:
    hits: set[str] = set()
    for index in range(4000 + place, 4000 + place + 3 * len(TRANSPORTS), len(TRANSPORTS)):
        report = wire.run(draw(5, index))
        assert report.violations == []
        assert report.transfers == 40
        assert report.admitted > 0
        hits |= set(report.hits)
    assert len(hits) > 8


def small_matrix() -> list[Case]:
    return [c for c in matrix() if (c.setting.source_tp, c.setting.dest_tp) == (2, 4) and c.setting.shape != "dense"]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_bytes_held_and_moved(wire: Wire, transport: str) -> None:
    for case in (c for c in small_matrix() if c.setting.transport == transport):
        report = wire.run(case, is_measuring=True)
        assert report.violations == []
        assert len(report.figures) == case.transfers == 6
        for row in report.figures:
            assert (row.held, row.moved, row.landed) == (row.ideal_held, row.ideal_moved, row.ideal_landed)


@pytest.mark.parametrize(("part", "indices"), [("kills", [0, 4, 26]), ("stops", [2, 25])])
def test_workers_that_are_struck(folder: Path, part: str, indices: list[int]) -> None:
    results: dict[int, dict[str, Any]] = {}
    strikes = run_strikes(part, 3, indices, 2, folder, results.__setitem__, lambda: False)
    asyncio.run(strikes)
    assert sorted(results) == indices
    for result in results.values():
        assert result["violations"] == []
        assert result["router_s"] is not None
        assert result["baseline_s"] is not None


def test_a_run_of_full_length_that_left_a_fault_out_says_so(tmp_path: Path) -> None:
    record = Record(tmp_path / "transfer.json", 1)
    for index, transport in enumerate(TRANSPORTS):
        hits = dict.fromkeys(faults_of(transport), 3)
        if transport == "grpc":
            del hits["truncate"]
        entry = {"transport": transport, "transfers": FULL_LENGTH // len(TRANSPORTS), "admitted": 1, "bytes": 1}
        record.add("wire", index, entry | {"hits": hits, "violations": []})
    assert record.faults_left_out == ["grpc: truncate"]
    record.entries["wire"][2]["transfers"] -= 1  # a shorter one may well have missed some
    assert record.faults_left_out == []


def test_the_program_goes_on_where_it_was(tmp_path: Path) -> None:
    out = tmp_path / "transfer.json"

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "proof.transfer", f"--out={out}", "--part=wire", "--seed=9", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)

    assert run("--count=40").returncode == 0
    first = json.loads(out.read_text())
    assert list(first["wire"]) == ["0"]
    done = run("--count=80")
    assert (done.returncode, "1 of 1 cases" in done.stdout) == (0, True), done.stdout + done.stderr
    second = json.loads(out.read_text())
    assert list(second["wire"]) == ["0", "1"]
    assert second["wire"]["0"] == first["wire"]["0"]
    assert second["summary"]["wire"]["transfers"] == 80
    cut = run("--count=160", "--budget-s=0.001", "--jobs=1")  # two of them might both begin in time
    assert (cut.returncode, "run it again" in cut.stdout) == (os.EX_TEMPFAIL, True), cut.stdout + cut.stderr
    assert set(second["summary"]["not_run"]) == {"cuda_ipc", "nccl"}
