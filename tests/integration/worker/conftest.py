"""Short temporary folders (unix sockets have short names)."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="td-") as name:
        yield Path(name)
