"""A step takes no more than was planned for it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.engine import memory_program
from tools import random_model
from tools.random_model import RandomModel, make_random_model


def took_and_planned(folder: Path, shape: RandomModel, *options: str, **environment: str) -> tuple[int, int]:
    """Measure in a fresh process: memory that the allocator keeps from before would hide the step's own."""
    make_random_model(shape, folder)
    program = [sys.executable, "-m", memory_program.__name__, str(folder), *options]
    done = subprocess.run(
        program, capture_output=True, text=True, timeout=100, check=False, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    print(f"{shape.family} in {shape.dtype}: planned {said['planned'] >> 20} MiB, took {said['took'] >> 20} MiB")
    return said["took"], said["planned"]


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("family", "dtype"), [
        ("llama", "float32"), ("llama", "bfloat16"), ("mixtral", "float32"), ("gpt_oss", "bfloat16"),
        ("deepseek_v3", "bfloat16"),
    ],
)  # fmt: skip
def test_the_largest_step_stays_within_its_plan(tmp_path: Path, family: str, dtype: str) -> None:
    shape = RandomModel(family=family, hidden=512, layers=2, heads=8, kv_heads=4, vocab=16_384, dtype=dtype)
    took, planned = took_and_planned(tmp_path / "model", shape)
    assert planned / 8 < took <= planned


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("dtype", "family", "native"), [("float32", "llama", "0"), ("bfloat16", "llama", "0"), ("bfloat16", "gemma2", "1")]
)
def test_a_wide_mlp_stays_within_its_plan_in_deterministic_mode(
    tmp_path: Path, dtype: str, family: str, native: str
) -> None:
    """Where its activation is written out, in several operations."""
    shape = RandomModel(
        family=family, hidden=64, intermediate=16_384, layers=1, heads=4, kv_heads=2, vocab=256, dtype=dtype
    )
    took, planned = took_and_planned(tmp_path / "model", shape, "deterministic", TANDEM_NATIVE=native)
    assert planned / 8 < took <= planned


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("dtype", "family", "options"), [
        ("float32", "deepseek_v2", ("long",)), ("bfloat16", "deepseek_v3", ("long",)),
        ("bfloat16", "deepseek_v3", ("deterministic", "long")),
    ],
)  # fmt: skip
def test_latent_attention_of_a_published_width_stays_within_its_plan(
    tmp_path: Path, dtype: str, family: str, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every head's queries and answers are as wide as the latent: of one token, attention is the widest moment."""
    for name, width in (("LATENT_RANK", 512), ("PLAIN", 128), ("TURNED", 64), ("VALUE", 128)):
        monkeypatch.setattr(random_model, name, width)
    shape = RandomModel(
        family=family, hidden=64, intermediate=64, layers=1, heads=16, vocab=256, dtype=dtype, max_positions=8192
    )
    took, planned = took_and_planned(tmp_path / "model", shape, *options)
    assert planned / 8 < took <= planned
