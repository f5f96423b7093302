"""A model of a billion parameters, with random weights: built once, into a cache folder. Not a benchmark itself."""

from __future__ import annotations

from pathlib import Path

from bench.model_135m import made
from tools.random_model import RandomModel

SHAPE = RandomModel(
    family="llama", hidden=2048, intermediate=5632, layers=22, heads=32, kv_heads=4, vocab=32_000, max_positions=4096,
    dtype="bfloat16", std=0.02,
)  # fmt: skip


def folder() -> Path:
    """The model's folder (2.2 GB); made if it is missing."""
    return made(SHAPE, "bench-1b")
