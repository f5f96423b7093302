"""CI's slice of `make proof NAME=packed`: mutated checkpoints end in a model or in one line."""

import pytest

from proof.packed.__main__ import FORMS, run_slice


@pytest.mark.drawn(3)
@pytest.mark.parametrize("seed", range(1000, 1000 + len(FORMS)))
def test_mutated_checkpoints_end_in_a_line(seed: int) -> None:
    found = run_slice(seed, 200)
    assert found["broken"] == []
    assert found["files"] == 200
    assert found["refused"] > 60
    assert found["read"] > 10
