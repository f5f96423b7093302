"""Proofs that are run again: a file is written only if something new is known, and reports all that it holds."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.report import ROOT, commit
from proof.calibration import __main__ as calibration
from proof.calibration import closing
from proof.calibration.closing import Knobs
from proof.calibration.runs import RUNS
from proof.frozen import __main__ as frozen
from proof.record import UNKNOWN
from tandem.controlplane.simulator import calibration as measurements
from tandem.controlplane.simulator.calibration import Calibration
from tests.chaos.frozen import CELLS

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
