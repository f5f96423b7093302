"""A proof's results file: kept results, repeated runs, and its summary."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.report import ROOT, commit
from proof.handover import __main__ as handover
from proof.handover.disturbed import Outcome
from proof.record import CUT, UNKNOWN, Record

COMMITTED = sorted((ROOT / "proof" / "results").rglob("*.json"))
"""Those of other seeds are named by proof and seed."""


@pytest.fixture(autouse=True)
def is_logging_again() -> Iterator[None]:
    """Programs keep the log quiet: every seed has failures on purpose."""
    yield
    logging.disable(logging.NOTSET)


def record_of(path: Path, seed: int = 1, *, is_fresh: bool = False) -> Record:
    return Record(path, "some", {"seed": seed, "sizes": (1, 2)}, is_fresh=is_fresh)


def test_a_run_goes_on_with_what_another_kept(tmp_path: Path) -> None:
    first = record_of(tmp_path / "new" / "some.json")
    first.content["seeds"] = {"1": {"answers": 3}}
    first.save()
    assert record_of(first.path).content == {"seeds": {"1": {"answers": 3}}}
    assert json.loads(first.path.read_text())["commits"] == [commit() or UNKNOWN]
    assert record_of(first.path, seed=2).content == {}
    assert record_of(first.path, is_fresh=True).content == {}
    assert Record(first.path, "another", {"seed": 1, "sizes": (1, 2)}).content == {}
    assert [path.name for path in first.path.parent.iterdir()] == ["some.json"]


def test_a_file_that_cannot_be_written_is_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(path: Path, text: str) -> int:
        path.write_bytes(text[:9].encode())
        raise OSError("no space")

    record = record_of(tmp_path / "some.json")
    record.content["seeds"] = {"1": {}}
    record.save()
    before = record.path.read_text()
    record.content["seeds"]["2"] = {}
    monkeypatch.setattr(Path, "write_text", full_disk)
    with pytest.raises(OSError, match="no space"):
        record.save()
    assert record.path.read_text() == before


def test_results_of_a_commit_that_is_not_told_are_not_this_one_s(tmp_path: Path) -> None:
    path = tmp_path / "some.json"
    path.write_text(json.dumps({"name": "some", "seed": 1, "sizes": [1, 2], "seeds": {"1": {}}}))
    record = record_of(path)
    assert record.content == {"seeds": {"1": {}}}
    record.save()
    assert json.loads(path.read_text())["commits"] == [UNKNOWN, *([commit()] if commit() else [])]


def test_what_is_no_record_is_refused(tmp_path: Path) -> None:
    (tmp_path / "some.json").write_text('{"name": "some", "se')
    with pytest.raises(SystemExit, match="holds no results of a proof"):
        record_of(tmp_path / "some.json")


def test_how_a_run_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def end(record: Record, **left: int) -> tuple[int, str]:
        return record.verdict(3, **left), capsys.readouterr().out

    record = record_of(tmp_path / "some.json")
    assert end(record, left=4) == (CUT, "no broken promise in 3 results; 4 left: run it again to go on\n")
    record.content["seeds"] = {"1": {}}
    record.save()
    known = f"3 results of commit {commit() or UNKNOWN}"
    assert end(record) == (0, f"no broken promise in {known}\n")
    assert end(record, broken=1, left=4) == (1, f"broken promises in 1 of {known}\n")
    again = record_of(record.path)
    status, said = end(again)
    assert (status, said.partition(";")[0]) == (0, f"nothing to do: {known}")
    status, said = end(again, broken=1)
    assert (status, "none was run now" in said) == (1, True)


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_committed_results_are_read(path: Path) -> None:
    assert Record(path, path.stem.partition("-")[0], {}).content


def test_a_proof_runs_what_is_not_on_record_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[int] = []

    def run_seed(seed: int, *_: Any) -> Outcome:
        ran.append(seed)
        return Outcome(requests=2, attempts=3, completed=1, breakages=1, turns=9)

    monkeypatch.setattr(handover, "run_seed", run_seed)
    monkeypatch.setattr(handover, "undisturbed", lambda _: {})

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["proof.handover", "--out", str(tmp_path / "out.json"), *arguments])
        assert handover.main() == 0
        return capsys.readouterr().out

    assert "no broken promise in 2 results" in run("--seed", "7", "--seeds", "2")
    assert "nothing to do: 2 results of commit" in run("--seed", "7", "--seeds", "2")
    assert ran == [7, 8]
    assert "no broken promise in 3 results" in run("--seed", "7", "--seeds", "3")
    assert "no broken promise in 1 results" in run("--seed", "20", "--seeds", "1")
    assert ran == [7, 8, 9, 20]
    run("--seed", "20", "--seeds", "1", "--fresh")
    assert ran == [7, 8, 9, 20, 20]


def test_a_broken_promise_comes_with_what_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_seed(seed: int, *_: Any) -> Outcome:
        assert seed != 8, "a token twice"
        return Outcome(requests=2, attempts=3, completed=1, breakages=1, turns=9)

    monkeypatch.setattr(handover, "run_seed", run_seed)
    monkeypatch.setattr(handover, "undisturbed", lambda _: {})
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["proof.handover", "--out", str(out), "--seed=7", "--seeds=5"])
    with pytest.raises(AssertionError, match="a token twice"):
        handover.main()
    again = "make proof NAME=handover ARGS='--seed 8 --seeds 1 --fresh' OUT=build/again.json"
    assert again in capsys.readouterr().err
    assert list(json.loads(out.read_text())["seeds"]) == ["7"]
