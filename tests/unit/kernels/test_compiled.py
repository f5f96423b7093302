"""All C code of the kernels compiles where there is a compiler: without it, slower paths would pass every test."""

import shutil
from pathlib import Path

import pytest

from tandem.kernels import native
from tandem.kernels.installing import sources


@pytest.mark.skipif(shutil.which("cc") is None and shutil.which("gcc") is None, reason="there is no C compiler")
@pytest.mark.parametrize("source", sources(), ids=lambda source: source.parent.name)
def test_it_compiles_and_loads(source: Path) -> None:
    assert native.load(source) is not None
