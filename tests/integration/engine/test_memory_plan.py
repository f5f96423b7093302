"""A step takes no more than was planned for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.engine import memory_program
from tools.random_model import RandomModel, make_random_model


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("llama", "float32"), ("llama", "bfloat16"), ("mixtral", "float32"), ("gpt_oss", "bfloat16")],
    ids="-".join,
)
def test_the_largest_step_stays_within_its_plan(tmp_path: Path, family: str, dtype: str) -> None:
    """Of a fresh process: memory that the allocator keeps from before would hide what the step takes."""
    shape = RandomModel(family=family, hidden=512, layers=2, heads=8, kv_heads=4, vocab=16_384, dtype=dtype)
    make_random_model(shape, tmp_path / "model")
    program = [sys.executable, "-m", memory_program.__name__, str(tmp_path / "model")]
    done = subprocess.run(program, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    print(f"{family} in {dtype}: planned {said['planned'] >> 20} MiB, took {said['took'] >> 20} MiB")
    assert said["planned"] / 8 < said["took"] <= said["planned"]
