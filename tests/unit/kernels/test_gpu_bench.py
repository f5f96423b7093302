"""The GPU bench where there is no GPU: it says so, claims nothing, and still succeeds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from bench.gpu.run import PARTS

ROOT = Path(__file__).resolve().parents[3]


def run_bench(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bench.gpu", "--out", str(out), "--commit", "test", *arguments],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=200,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": ""},
    )  # fmt: skip


def test_without_a_device_it_says_so(tmp_path) -> None:
    out = tmp_path / "gpu.json"
    result = run_bench(out)
    assert result.returncode == 0, result.stderr
    assert "No CUDA device" in result.stdout
    content = json.loads(out.read_text())
    assert (content["name"], content["device"], content["rows"]) == ("gpu", "none", [])


def test_rehearsal_runs_every_part_and_resumes(tmp_path) -> None:
    out = tmp_path / "gpu.json"
    first = run_bench(out, "--rehearse", "--part", "correctness")
    assert first.returncode == 0, first.stdout + first.stderr
    half = json.loads(out.read_text())
    assert {row["unit"] for row in half["rows"]} >= {"error", "GB/s", "TFLOP/s"}
    assert all(row["value"] <= row["limit"] for row in half["rows"] if row["unit"] == "error")
    whole = run_bench(out, "--rehearse")
    assert whole.returncode == 0, whole.stdout + whole.stderr
    assert "decode float32" not in whole.stdout
    content = json.loads(out.read_text())
    assert content["rows"][: len(half["rows"])] == half["rows"]
    assert {name.split(":")[0] for name in content["done"]} == {"machine", *PARTS}
