"""Forbidding tokens by bits: C code on every instruction set of this machine, and the reference, against Python."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tandem.core.cpu_level import CpuLevel
from tandem.kernels.token_mask import LIBRARY, forbid
from tests.unit.kernels.levels import paths_of, threads_of

threads = threads_of(1, 2, autouse=True)


@pytest.fixture(params=["", "reference", *paths_of(LIBRARY, CpuLevel.AVX2, CpuLevel.AVX512)], autouse=True)
def backend(request: pytest.FixtureRequest) -> Iterator[str | None]:
    if request.param == "reference":
        yield "reference"
        return
    assert LIBRARY.choose_path(request.param) or not LIBRARY.is_available()
    yield None
    LIBRARY.choose_path("")


def bits_of(rows: int, stride: int, seed: int) -> Tensor:
    return torch.randint(0, 256, (rows, stride), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("width", [1, 7, 8, 20, 33, 4096, 50_003])
def test_tokens_without_a_bit_are_forbidden(randn, width: int, backend: str | None) -> None:
    scores, rows = randn(12, width), [3, 0, 11, 7, 8, 5, 1]
    scores[0, 0] = math.inf
    bits = bits_of(len(rows), -(-width // 8) + 3, width)
    want = scores.clone()
    for place, row in enumerate(rows):
        for token in range(width):
            if not int(bits[place, token // 8]) >> token % 8 & 1:
                want[row, token] = -math.inf
    forbid(scores, rows, bits, backend=backend)
    assert torch.equal(scores, want)


def test_no_rows_change_nothing(randn, backend: str | None) -> None:
    scores = randn(2, 16)
    before = scores.clone()
    forbid(scores, [], torch.empty(0, 2, dtype=torch.uint8), backend=backend)
    assert torch.equal(scores, before)


def test_other_shapes_and_dtypes_are_refused(randn, backend: str | None) -> None:
    scores = randn(2, 20)
    for rows, bits in (([0], bits_of(1, 2, 0)), ([0, 1], bits_of(1, 3, 0)), ([2], bits_of(1, 3, 0))):
        with pytest.raises(ValueError, match="scores are"):
            forbid(scores, rows, bits, backend=backend)
    with pytest.raises(TypeError, match="uint8"):
        forbid(scores, [0], bits_of(1, 3, 0).int(), backend=backend)
