"""Test results files of proofs, and repeated runs."""

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.report import ROOT, commit
from proof.calibration import __main__ as calibration
from proof.calibration import closing
from proof.calibration.closing import Knobs
from proof.calibration.runs import RUNS
from proof.frozen import __main__ as frozen
from proof.handover import __main__ as handover
from proof.handover.disturbed import Outcome
from proof.record import CUT, UNKNOWN, Record
from tandem.controlplane.simulator import calibration as measurements
from tandem.controlplane.simulator.calibration import Calibration
from tests.chaos.frozen import CELLS

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


STOPPED = {"out_s": 2.0, "back_s": 0.1}


def run(program: Any, monkeypatch: pytest.MonkeyPatch, out: Path, *more: str) -> int:
    monkeypatch.setattr(sys, "argv", ["proof", "--out", str(out), *more])
    return int(program.main())


def test_frozen_sums_up_all_that_is_on_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Independent of this run's entries: one entry alone and of another seed."""
    one, another = (str(cell) for cell in CELLS[:2])
    kept = {f"{one}, seed 1": STOPPED, f"{another}, seed 1": {"out_s": 2.6, "back_s": 0.1}}
    out = tmp_path / "frozen.json"
    out.write_text(json.dumps({"name": "frozen", "commits": ["old"], "entries": kept}))

    def stand_still(todo: Any, record: Any, ends_s: float) -> None:
        for entry, seed in todo:
            record.content["entries"][f"{entry}, seed {seed}"] = {"out_s": 1.0, "back_s": 0.1}
            record.save()

    monkeypatch.setattr(frozen, "_run", stand_still)
    assert run(frozen, monkeypatch, out, "--only", one, "--seed", "7", "--passes", "1") == 0
    stopped = json.loads(out.read_text())["summary"]["stopped, out of rotation"]
    assert stopped == {"of": 3, "median_s": 2.0, "worst_s": 2.6}


def test_frozen_leaves_the_file_alone_where_nothing_was_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "frozen.json"
    out.write_bytes((ROOT / "proof" / "results" / "frozen.json").read_bytes())
    before = out.read_text()
    one = str(CELLS[0])
    assert run(frozen, monkeypatch, out, "--only", one, "--passes", "1") == 0
    said = capsys.readouterr().out
    assert "nothing to do: 1 results" in said
    assert f"stopped, out of rotation: {json.loads(before)['summary']['stopped, out of rotation']}" in said
    assert out.read_text() == before


def test_calibration_that_finds_the_same_again_leaves_the_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The simulator's output is made short; only the kept part of it counts."""
    base = Calibration(prefill_token_s=1e-3, decode_step_s=0.02)
    figures = {"ttft_p50_s": 1.0, "ttft_p90_s": 2.0, "tokens_per_s": 30.0}
    answers = {"measured": [0.25]}
    content = {
        "name": "calibration", "load": {"seconds": 45.0, "seed": 0}, "commits": ["old"], "sim measured": {},
        "sim runs": {one.name: {"requests": 5, "figures": figures} for one in RUNS},
    }  # fmt: skip
    monkeypatch.setattr(measurements, "from_record", lambda measured: base)
    monkeypatch.setattr(closing, "closest", lambda base, runs: (Knobs(rpc_s=answers["measured"][0]), 0.01))
    monkeypatch.setattr(closing, "play", lambda run, trace, fitted: dict(figures))
    out = tmp_path / "calibration.json"
    out.write_text(json.dumps(content))
    assert run(calibration, monkeypatch, out, "--engine", "sim") == 0
    first = out.read_text()
    assert json.loads(first)["sim calibration"]["rpc_s"] == 0.25
    out.write_text(first.replace(f'"{commit() or UNKNOWN}"', '"older"'))
    before = out.read_text()
    capsys.readouterr()
    assert run(calibration, monkeypatch, out, "--engine", "sim") == 0
    assert f"nothing to do: {len(RUNS)} results of commit old, older; " in capsys.readouterr().out
    assert out.read_text() == before
    answers["measured"] = [0.5]
    assert run(calibration, monkeypatch, out, "--engine", "sim") == 0
    assert json.loads(out.read_text())["sim calibration"]["rpc_s"] == 0.5
    assert len(json.loads(out.read_text())["commits"]) == 3
