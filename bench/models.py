"""Models with random weights, built once, into a cache folder. Not a benchmark itself."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from tandem.controlplane.model_catalog import SMOLLM2
from tandem.controlplane.model_download import pull
from tools.random_model import RandomModel, make_random_model

SHAPE_135M = RandomModel(
    family="llama", hidden=576, intermediate=1536, layers=30, heads=9, kv_heads=3, vocab=49_152, max_positions=4096,
    dtype="bfloat16", std=0.02, is_tied=True,
)  # fmt: skip
SHAPE_1B = RandomModel(
    family="llama", hidden=2048, intermediate=5632, layers=22, heads=32, kv_heads=4, vocab=32_000, max_positions=4096,
    dtype="bfloat16", std=0.02,
)  # fmt: skip


def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file, pulled where it is not there yet."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem" / "bench-models"
    return pull(SMOLLM2, cache)


def model_135m() -> Path:
    """The folder of a model of 135M parameters; made if it is missing."""
    return _made(SHAPE_135M, "bench-135m")


def model_1b() -> Path:
    """The folder of a model of a billion parameters (2.2 GB); made if it is missing."""
    return _made(SHAPE_1B, "bench-1b")


def model_1b_for(vocab: int) -> Path:
    """As `model_1b`, with so many tokens."""
    return _made(replace(SHAPE_1B, vocab=vocab), f"bench-1b-{vocab}")


def _made(shape: RandomModel, name: str) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem" / name
    if not (cache / "complete").exists():
        make_random_model(shape, cache)
        (cache / "complete").touch()
    return cache
