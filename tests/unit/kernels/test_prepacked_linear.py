"""Products with a packed weight: few rows by C code from oneDNN's own bytes, many by oneDNN, against float64.

With AVX2 the C code multiplies any number of rows, from bytes that it packed itself."""

import pytest
import torch

from tandem.core.cpu_level import CpuLevel
from tandem.kernels import native
from tandem.kernels.prepacked_linear import LIBRARY, PrepackedLinear, find_layout
from tandem.kernels.prepacked_linear.reference import prepacked_linear_reference
from tandem.kernels.widened_linear import FEW_ROWS, widened_linear
from tandem.kernels.widened_linear import LIBRARY as WIDENED
from tests.unit.kernels.levels import needs, paths_of, threads_of

PATHS = paths_of(LIBRARY, CpuLevel.AVX2, CpuLevel.AVX512, CpuLevel.AVX512BF16, CpuLevel.AMX)
SHAPES = [(32, 16), (48, 64), (576, 192), (2064, 576), (160, 100)]
threads = threads_of(1, 2, 3)


@needs(CpuLevel.AVX2)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_few_rows_are_the_reference(threads, randn, shape, has_bias, path) -> None:
    weight, bias = randn(*shape, dtype=torch.bfloat16), randn(shape[0], dtype=torch.bfloat16)
    linear = PrepackedLinear(weight, bias if has_bias else None)
    assert LIBRARY.choose_path(path)
    try:
        for rows in (*range(1, 11), 16, 17, 32, 45, 64, 100):
            if linear.layout is not None:
                linear._few_rows = max(rows, linear._few_rows)  # more of them than is worth while
            x = randn(rows, shape[1], dtype=torch.bfloat16)
            expected = prepacked_linear_reference(x, weight, bias if has_bias else None)
            torch.testing.assert_close(linear(x), expected, atol=2e-2, rtol=1.6e-2)
    finally:
        LIBRARY.choose_path("")


@needs(CpuLevel.AVX512BF16)  # below, it packs in another way
def test_few_rows_are_read_from_the_bytes_that_onednn_packed(randn) -> None:
    """Where oneDNN packs in pairs the layout is found, and zeros, which show nothing, are left to oneDNN."""
    weight = randn(576, 192, dtype=torch.bfloat16)
    linear = PrepackedLinear(weight)
    assert linear.layout is not None, "oneDNN packs in another way"
    assert linear.layout.block_numbers == 192 * linear.layout.block
    assert PrepackedLinear(torch.zeros_like(weight)).layout is None
    other = weight.clone()
    other[-1, -1] += 1
    assert find_layout(linear._packed, other) is None
    x = randn(1, 192, dtype=torch.bfloat16)
    expected = linear(x)
    linear._few_rows = 0
    torch.testing.assert_close(linear(x), expected, atol=2e-2, rtol=1.6e-2)


@needs(CpuLevel.AMX)
def test_who_multiplies_how_many_rows(randn, monkeypatch) -> None:
    """With a matrix unit: C code for few rows, and for those of a narrow weight that oneDNN leaves to one thread."""
    narrow, wide = (PrepackedLinear(randn(columns, 192, dtype=torch.bfloat16)) for columns in (576, 1152))
    by_code: list[int] = []
    monkeypatch.setattr(PrepackedLinear, "_multiply_by_code", lambda _, x: by_code.append(x.shape[0]))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    for linear in (narrow, wide):
        for rows in (1, 64, 65, 255, 256, 1023, 1024):
            linear(randn(rows, 192, dtype=torch.bfloat16))
    assert by_code == [1, 64, 256, 1023, 1, 64]


@needs(CpuLevel.AVX2)
@pytest.mark.parametrize("rows", [4, 13])
def test_rows_may_be_strided(randn, rows) -> None:
    weight, wide = randn(64, 32, dtype=torch.bfloat16), randn(rows, 96, dtype=torch.bfloat16)
    linear = PrepackedLinear(weight)
    if linear.layout is not None:
        linear._few_rows = max(rows, linear._few_rows)
    for x in (wide[:, 32:64], wide[:, ::3]):
        expected = prepacked_linear_reference(x, weight, None)
        torch.testing.assert_close(linear(x), expected, atol=2e-2, rtol=1.6e-2)


@pytest.mark.parametrize("shape", [(33, 16), (32, 17), (576, 192)])
def test_float32_and_odd_shapes_are_left_to_onednn(randn, shape) -> None:
    weight, bias = randn(*shape), randn(shape[0])
    linear = PrepackedLinear(weight, bias)
    assert linear.layout is None
    for rows in (0, 1, 5):
        x = randn(rows, shape[1])
        torch.testing.assert_close(linear(x), x @ weight.t() + bias, atol=1e-4, rtol=1e-4)
    assert PrepackedLinear(weight.bfloat16())(randn(0, shape[1], dtype=torch.bfloat16)).shape == (0, shape[0])


def test_a_product_of_no_rows_does_not_read_the_weight(randn, monkeypatch) -> None:
    """The head is called so by every chunk that does not end a prompt, and its weight is the model's largest."""
    linear = PrepackedLinear(randn(2064, 576, dtype=torch.bfloat16))
    for attribute in ("_own", "_plain", "_packed", "_multiply"):
        monkeypatch.setattr(linear, attribute, None, raising=False)
    result = linear(randn(0, 576, dtype=torch.bfloat16))
    assert result.shape == (0, 2064)
    assert result.dtype is torch.bfloat16


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(33, 17), (2064, 576), (1, 300_000), (100, 0)])
def test_bfloat16_that_onednn_does_not_pack_is_multiplied_as_float32(threads, randn, shape, has_bias) -> None:
    """In slices of the weight, one of them shorter than the others, one wider than a slice, and rounded once."""
    weight, bias = randn(*shape, dtype=torch.bfloat16), randn(shape[0], dtype=torch.bfloat16) if has_bias else None
    for rows in (0, 1, FEW_ROWS, FEW_ROWS + 1, 40):
        x = randn(rows, shape[1], dtype=torch.bfloat16)
        expected = prepacked_linear_reference(x, weight, bias)
        torch.testing.assert_close(widened_linear(x, weight, bias), expected, atol=2e-2, rtol=1.6e-2)


@needs(CpuLevel.AVX2)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (5, 8), (33, 17), (64, 1003), (577, 576)])
def test_few_rows_of_a_plain_weight_are_the_reference(threads, randn, shape, has_bias) -> None:
    """By C code, with any remainder of four columns, two rows and eight numbers, and wherever rows lie."""
    assert WIDENED.is_available()
    weight, bias = randn(*shape, dtype=torch.bfloat16), randn(shape[0], dtype=torch.bfloat16) if has_bias else None
    for rows in range(1, FEW_ROWS + 1):
        wider = randn(rows, shape[1] + 3, dtype=torch.bfloat16)
        for x in (wider[:, 3:], wider.t().contiguous().t()[:, : shape[1]]):
            expected = prepacked_linear_reference(x, weight, bias)
            torch.testing.assert_close(widened_linear(x, weight, bias), expected, atol=2e-2, rtol=1.6e-2)


def test_a_row_with_nan_or_infinity_keeps_it(randn) -> None:
    weight, x = randn(6, 24, dtype=torch.bfloat16).abs(), randn(2, 24, dtype=torch.bfloat16)
    x[0, 3], x[1, 20] = float("nan"), float("inf")
    first, second = widened_linear(x, weight)
    assert first.isnan().all()
    assert second.isposinf().all()


@needs(CpuLevel.AVX2)
@pytest.mark.parametrize("shape", [(16, 2), (208, 192), (2064, 576)])
def test_with_avx2_a_row_is_the_same_alone_and_among_any_others(threads, randn, monkeypatch, shape) -> None:
    """With widened rows or not, and across the most rows that are widened together; it is the reference's."""
    monkeypatch.setattr("tandem.kernels.prepacked_linear.packs", lambda _: False)
    monkeypatch.setattr("tandem.kernels.prepacked_linear._TOGETHER_ROWS", 48)
    assert LIBRARY.choose_path("avx2")
    try:
        weight, bias = randn(*shape, dtype=torch.bfloat16), randn(shape[0], dtype=torch.bfloat16)
        linear, x = PrepackedLinear(weight, bias), randn(101, shape[1], dtype=torch.bfloat16)
        every = linear(x)
        torch.testing.assert_close(every, prepacked_linear_reference(x, weight, bias), atol=2e-2, rtol=1.6e-2)
        for rows in (1, 2, 3, 4, 8, 9, 13, 48, 49):
            assert torch.equal(linear(x[-rows:]), every[-rows:])
    finally:
        LIBRARY.choose_path("")


@needs(CpuLevel.AVX2)
def test_an_own_weight_is_multiplied_where_the_code_is_switched_off(randn, monkeypatch) -> None:
    monkeypatch.setattr("tandem.kernels.prepacked_linear.packs", lambda _: False)
    weight, x = randn(64, 32, dtype=torch.bfloat16), randn(5, 32, dtype=torch.bfloat16)
    linear = PrepackedLinear(weight)
    assert linear.layout is not None
    was_on = native.enable(False)
    try:
        torch.testing.assert_close(linear(x), prepacked_linear_reference(x, weight, None), atol=2e-2, rtol=1.6e-2)
    finally:
        native.enable(was_on)


@pytest.mark.parametrize("shape", [(65, 32), (64, 31)])
def test_without_onednn_s_bfloat16_an_odd_weight_is_copied_and_multiplied(randn, monkeypatch, shape) -> None:
    monkeypatch.setattr("tandem.kernels.prepacked_linear.packs", lambda _: False)
    weight, bias = randn(*shape, dtype=torch.bfloat16), randn(shape[0], dtype=torch.bfloat16)
    kept = weight.clone()
    linear = PrepackedLinear(weight, bias)
    weight.zero_()
    assert linear.layout is None
    assert not linear.has_single_rows
    for rows in (0, 1, 5, 40):
        x = randn(rows, shape[1], dtype=torch.bfloat16)
        torch.testing.assert_close(linear(x), prepacked_linear_reference(x, kept, bias), atol=2e-2, rtol=1.6e-2)
