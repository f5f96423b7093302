"""Tests of the Triton kernels in Triton's interpreter. They need a process of their own.

Triton reads `TRITON_INTERPRET` when a kernel is decorated: one mode a process. Without the variable these tests are
skipped here and run by `TRITON_INTERPRET=1 pytest tests/unit/kernels/interpreter`. The interpreter multiplies bfloat16
wrongly without a word, so bfloat16 is held against the reference on a device, by `bench/gpu`.
"""

import importlib.util
import os
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = None
    if os.environ.get("TRITON_INTERPRET") != "1":
        reason = "runs in a process of its own: TRITON_INTERPRET=1 pytest tests/unit/kernels/interpreter"
    elif importlib.util.find_spec("triton") is None:
        reason = "Triton is not installed"
    if reason is not None:
        for item in items:
            if item.path.is_relative_to(HERE):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def many_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles and splits, so that tiny cases have several of both."""
    from tandem.kernels import triton_tiles

    monkeypatch.setattr(triton_tiles, "DECODE_TILES", {64: (16, 4, 2)})
    monkeypatch.setattr(triton_tiles, "SPLIT_TOKENS", 16)
    monkeypatch.setattr(triton_tiles, "EXTEND_TILES", {64: (16, 16, 4, 2)})
