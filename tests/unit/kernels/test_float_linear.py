"""Test float_linear against float64."""

import pytest
import torch

from tandem.core.cpu_level import CpuLevel
from tandem.kernels import native
from tandem.kernels.float_linear import LIBRARY, MAX_PART, FloatLinear
from tandem.kernels.float_linear.reference import float_linear_reference
from tests.unit.kernels.levels import needs, paths_of, threads_of

PATHS = paths_of(LIBRARY, CpuLevel.AVX2, CpuLevel.AVX512)
SHAPES = [(16, 1), (1, 7), (48, 64), (100, 385), (33, 800), (576, 576), (17, 1536)]
ROWS = (0, 1, 2, 5, 6, 7, 12, 13, 25, 64, 145, 300)
threads = threads_of(1, 2, 3)


@needs(CpuLevel.AVX2)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_any_number_of_rows_is_within_rounding_of_float64(threads, randn, shape, has_bias, path) -> None:
    weight, bias = randn(*shape), randn(shape[0]) if has_bias else None
    linear = FloatLinear(weight, bias)
    assert LIBRARY.choose_path(path)
    try:
        for rows in ROWS:
            x = randn(rows, shape[1])
            exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
            torch.testing.assert_close(linear(x).double(), exact, atol=4e-6 * shape[1] ** 0.5, rtol=1e-6)
    finally:
        LIBRARY.choose_path("")


@needs(CpuLevel.AVX2)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_is_the_same_alone_among_others_and_on_each_cpu(threads, randn, shape) -> None:
    linear, x = FloatLinear(randn(*shape), randn(shape[0])), randn(300, shape[1])
    every = []
    for path in PATHS:
        assert LIBRARY.choose_path(path)
        every.append(linear(x))
        assert torch.equal(torch.cat([linear(x[row : row + 1]) for row in range(20)]), every[-1][:20])
        assert torch.equal(linear(x[7:20]), every[-1][7:20])
    LIBRARY.choose_path("")
    assert all(torch.equal(one, every[0]) for one in every)


@needs(CpuLevel.AVX2)
def test_rows_with_numbers_between_them_and_across(threads, randn) -> None:
    weight = randn(40, 50)
    linear, wide, across = FloatLinear(weight), randn(30, 90), randn(50, 30)
    for x in (wide[:, :50], wide[::3, 20:70], across.T):
        torch.testing.assert_close(linear(x), x @ weight.T)


@needs(CpuLevel.AVX2)
def test_sums_round_less_than_one_chain(randn) -> None:
    weight, x = randn(64, 4 * MAX_PART), randn(32, 4 * MAX_PART)
    exact, chain = x.double() @ weight.double().T, torch.zeros(32, 64)
    for here, there in zip(x.T, weight.T, strict=True):
        chain += here[:, None] * there
    error, of_chain = ((found.double() - exact).pow(2).mean().sqrt() for found in (FloatLinear(weight)(x), chain))
    assert error < 0.6 * of_chain


@pytest.mark.parametrize("shape", [(5, 0), (40, 1000)])
def test_without_code_torch_multiplies(randn, monkeypatch, shape) -> None:
    weight, bias, x = randn(*shape), randn(shape[0]), randn(9, shape[1])
    linear = FloatLinear(weight, bias)
    monkeypatch.setattr(native, "is_enabled", lambda: False)
    assert torch.equal(linear(x), float_linear_reference(x, weight, bias, linear.part))
    torch.testing.assert_close(linear(x), x @ weight.T + bias, atol=1e-4, rtol=1e-5)


def test_the_weight_is_copied_and_left_as_it_was(randn) -> None:
    weight, x = randn(48, 64), randn(3, 64)
    linear = FloatLinear(weight)
    expected = linear(x)
    weight.zero_()
    assert torch.equal(linear(x), expected)
