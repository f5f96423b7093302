"""The GPU bench where there is no GPU: it reports so, claims nothing, and still succeeds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu.report import draw
from bench.gpu.run import PARTS
from bench.report import Row, write

pytestmark = pytest.mark.slow

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


def test_cases_are_listed_without_a_device(tmp_path) -> None:
    result = run_bench(tmp_path / "gpu.json", "--list")
    assert result.returncode == 0, result.stderr
    *names, last = result.stdout.splitlines()
    assert "No CUDA device" in last
    assert len(names) == len(set(names)) > 100
    assert {name.split(":")[0] for name in names} == set(PARTS)
    for wanted in (
        "families: family gemma3", "attention: decode 32/32x128 batch 16 context 4096 block 16", "decode: model 14b",
        "attention: decode 64/8x128 batch 64 context 4096 block 64", "gap: host gap", "small: choose_token 64 rows",
        "attention: decode latents 128 heads batch 16 context 4096", "small: experts qwen3 30b",
    ):  # fmt: skip
        assert wanted in names
    assert not (tmp_path / "gpu.json").exists()


def test_a_picture_has_every_speed_with_a_limit_and_no_device_has_none(tmp_path) -> None:
    out, picture = tmp_path / "gpu.json", tmp_path / "gpu.svg"
    rows = [Row("decode 32/8x128 batch 1", "kv read", 5.0, "GB/s", 10.0), Row("machine", "copy", 10.0, "GB/s")]
    rows += [Row("model 8b", "decode speed", 3.0, "tokens/s", 4.0), Row("decode x", "difference", 0.1, "error", 1.0)]
    write("gpu", rows, out, commit="test", device="made up")
    assert draw(out, picture) == 2
    assert picture.read_text().count("<svg") == 1
    write("gpu", [], out, commit="test", device="none")
    with pytest.raises(ValueError, match="no speeds to draw: device none"):
        draw(out, picture)


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
