"""The model of 135M parameters' shape, with random weights: built once, into a cache folder. Not a benchmark itself."""

from __future__ import annotations

import os
from pathlib import Path

from tools.random_model import RandomModel, make_random_model

SHAPE = RandomModel(
    family="llama", hidden=576, intermediate=1536, layers=30, heads=9, kv_heads=3, vocab=49_152, max_positions=4096,
    dtype="bfloat16", std=0.02, is_tied=True,
)  # fmt: skip


def folder() -> Path:
    """The model's folder; made if it is missing."""
    return made(SHAPE, "bench-135m")


def made(shape: RandomModel, name: str) -> Path:
    """The folder `name` in the cache with a model of that shape; made if it is missing."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem" / name
    if not (cache / "complete").exists():
        make_random_model(shape, cache)
        (cache / "complete").touch()
    return cache
