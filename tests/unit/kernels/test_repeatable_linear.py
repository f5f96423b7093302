"""Rows of bfloat16 times a fixed weight: the same bits alone, in any company, on any number of threads."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tandem.core.cpu_level import CpuLevel
from tandem.kernels import native
from tandem.kernels.deterministic_linear import LIBRARY, RepeatableLinear
from tandem.kernels.prepacked_linear.reference import prepacked_linear_reference
from tests.unit.kernels.levels import paths_of

PATHS = ["torch", *paths_of(LIBRARY, CpuLevel.AVX512, CpuLevel.AVX512BF16, CpuLevel.AMX)]
SHAPES = [(64, 64), (16, 32), (192, 96), (33, 17), (509, 64), (1000, 100), (256, 688), (96, 2048), (1, 8)]
"""Of weights; with AMX an inner size that 32 does not divide goes through vectors."""


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    before = native.enable(request.param != "torch")
    assert request.param == "torch" or LIBRARY.choose_path(request.param)
    yield request.param
    LIBRARY.choose_path("")
    native.enable(before)


def compute(linear: RepeatableLinear, x: Tensor, threads: int = 1) -> Tensor:
    torch.set_num_threads(threads)
    return linear(x)


def test_torch_converts_a_weight_in_parts(randn, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = randn(100, 64, dtype=torch.bfloat16), randn(5, 64, dtype=torch.bfloat16)
    bias, before = randn(100, dtype=torch.bfloat16), native.enable(False)
    try:
        linear = RepeatableLinear(weight, bias)
        whole = linear(x)
        monkeypatch.setattr("tandem.kernels.deterministic_linear._CONVERTED", 48 * 64)
        assert torch.equal(linear(x), whole)
    finally:
        native.enable(before)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_is_independent_of_the_others(path: str, randn, shape: tuple[int, int]) -> None:
    weight, bias = randn(*shape, dtype=torch.bfloat16), randn(shape[0], dtype=torch.bfloat16)
    linear = RepeatableLinear(weight, bias)
    assert linear.is_native == (path != "torch" and shape[1] % 2 == 0)
    x = randn(83, shape[1], dtype=torch.bfloat16)
    whole = compute(linear, x)
    torch.testing.assert_close(whole, prepacked_linear_reference(x, weight, bias), atol=2e-2, rtol=1.6e-2)
    order = torch.randperm(83, generator=torch.Generator().manual_seed(3))
    assert torch.equal(compute(linear, x[order], 2), whole[order])
    for low, high in ((0, 1), (82, 83), (3, 8), (1, 16), (5, 22), (0, 31), (2, 34), (7, 57), (0, 64)):
        for threads in (1, 2, 3):
            assert torch.equal(compute(linear, x[low:high], threads), whole[low:high])
    noisy = x * 1e4
    for row in (0, 15, 16, 40, 82):
        noisy[row] = x[row]
        assert torch.equal(compute(linear, noisy)[row], whole[row])


def test_strided_and_shifted_rows_are_the_same(path: str, randn) -> None:
    weight, wide = randn(80, 64, dtype=torch.bfloat16), randn(20, 197, dtype=torch.bfloat16)
    linear = RepeatableLinear(weight)
    for x in (wide[:, 64:128], wide[:, 1:65], wide[:, 3::3][:, :64]):
        assert torch.equal(linear(x), linear(x.clone()))
        assert torch.equal(linear(x[5:6]), linear(x)[5:6])


def test_no_rows_and_no_changes_to_the_weight_matter(path: str, randn) -> None:
    weight = randn(48, 32, dtype=torch.bfloat16)
    linear, x = RepeatableLinear(weight), randn(4, 32, dtype=torch.bfloat16)
    before = linear(x)
    weight.zero_()
    assert torch.equal(linear(x), before)
    assert linear(x[:0]).shape == (0, 48)
