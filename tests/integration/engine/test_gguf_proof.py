"""CI's slice of `make proof NAME=gguf`: mutated files end in a model or in one line."""

import pytest

from proof.gguf.__main__ import BASES, run_slice


@pytest.mark.drawn(2)
@pytest.mark.parametrize("seed", range(1000, 1000 + len(BASES)))
def test_mutated_files_end_in_a_line(seed: int) -> None:
    found = run_slice(seed, 60)
    assert found["broken"] == []
    assert found["files"] == 60
    assert found["refused"] > 30
