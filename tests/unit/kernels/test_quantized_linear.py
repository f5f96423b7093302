"""Products with weights of 8 and 4 bits: every path gives the reference's exact sums, and quantising loses little."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from tandem.core.cpu_level import CpuLevel
from tandem.kernels import native
from tandem.kernels.quantized_linear import QuantizedLinear, QuantizedWeight, packed_bytes
from tandem.kernels.quantized_linear import linear as linears
from tandem.kernels.quantized_linear.error_feedback import error_feedback
from tandem.kernels.quantized_linear.reference import (
    outlier_numbers_reference,
    planes_reference,
    quantize_rows_reference,
    quantize_weight_reference,
    quantized_linear_reference,
)  # fmt: skip
from tandem.kernels.quantized_linear.weight import LIBRARY
from tandem.kernels.silu_mul import LIBRARY as GATES
from tandem.kernels.silu_mul import silu_mul
from tests.unit.kernels.levels import needs, paths_of, threads_of

PATHS = paths_of(LIBRARY, CpuLevel.AVX2, CpuLevel.AVX512VNNI, CpuLevel.AMX)
needs_code = needs(CpuLevel.AVX2)
SHAPES = [(64, 32), (576, 192), (100, 70), (33, 257), (1, 4)]
FORMATS = [(8, 8), (8, 16), (4, 8), (4, 16)]  # bits of weights and of rows
ROWS = (1, 2, 3, 4, 5, 9, 40)
threads = threads_of(1, 3)


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    assert LIBRARY.choose_path(request.param)
    yield request.param
    LIBRARY.choose_path("")


@pytest.fixture
def gates_path(path: str) -> Iterator[None]:
    """`silu_mul` with the same instructions."""
    assert GATES.choose_path("avx2" if path == "avx2" else "")
    yield
    GATES.choose_path("")


def numbers_of(weight: QuantizedWeight) -> Tensor:
    """Return a weight's values, read back: products with a single 127 in a row are 127 · a number."""
    linear = QuantizedLinear(weight)
    scales = weight.scales[: weight.columns]
    read = linear(torch.eye(weight.inner, dtype=weight.dtype)).float().t() / torch.where(scales > 0, scales, 1)[:, None]
    return read.round().to(torch.int8)


@needs_code
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("bits", "row_bits"), FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_few_rows_are_the_reference_to_the_last_bit(
    threads, randn, shape, bits, row_bits, dtype, path, monkeypatch
) -> None:
    weight = QuantizedWeight(randn(*shape, dtype=torch.float32), bits)
    weight.dtype = dtype
    bias = randn(shape[0], dtype=dtype)
    monkeypatch.setattr(linears, "FEW_ROWS", max(ROWS))
    numbers, scales = read_back(weight), weight.scales[: shape[0]]
    for rows in ROWS:
        for given in (None, bias):
            linear = QuantizedLinear(weight, given, row_bits=row_bits)
            x = randn(rows, shape[1] + 3, dtype=dtype)[:, 1:-2]
            expected = quantized_linear_reference(x, numbers, scales, given, row_bits)
            assert torch.equal(linear(x), expected), (rows, given is None)


@needs_code
@pytest.mark.parametrize("row_bits", [8, 16])
def test_the_largest_numbers_of_4_bits_fit_their_sums(randn, row_bits, path) -> None:
    """Rows of numbers as large as can be, with signs that make the sum of every other pair of products largest or
    least: AVX2 adds 16 of them in 16 bits."""
    lanes = torch.tensor([1.0, 1.0, -1.0, -1.0]).repeat(16)
    signs = torch.stack([torch.ones(64), lanes, randn(64).sign()])
    weight = QuantizedWeight(torch.cat([signs, -signs, signs.clamp(min=-0.1), signs.clamp(max=0.1)]), 4)
    linear = QuantizedLinear(weight, row_bits=row_bits)
    x = torch.cat([signs, -signs]) * 3
    numbers, scales = read_back(weight), weight.scales[: weight.columns]
    assert torch.equal(linear(x), quantized_linear_reference(x, numbers, scales, None, row_bits))


@needs_code
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("row_bits", [8, 16])
@pytest.mark.parametrize("shape", [*SHAPES, (130, 71), (1544, 2050)])
def test_many_rows_are_those_of_few(threads, randn, shape, row_bits, dtype, path) -> None:
    """In any remainder of six rows, 16 columns and four inner numbers, and in more than one block of rows."""
    weight, bias = QuantizedWeight(randn(*shape, dtype=dtype), 8), randn(shape[0], dtype=dtype)
    linear = QuantizedLinear(weight, bias, row_bits=row_bits)
    x = randn(67, shape[1] + 3, dtype=dtype)[:, 1:-2]
    expected = torch.cat([linear(row[None]) for row in x])
    for rows in (3, 4, 5, 6, 7, 9, 10, 12, 14, 15, 16, 17, 67):
        assert torch.equal(linear(x[:rows]), expected[:rows]), rows


@needs_code
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 32), (576, 192), (384, 576), (100, 70), (33, 257), (130, 71)])
def test_outliers_are_multiplied_by_numbers_of_15_bits(
    threads, randn, shape, dtype, path, gates_path
) -> None:  # fmt: skip
    """On every path to the last bit: few rows, many, and gates."""
    weight, bias, importance = randn(*shape, dtype=dtype), randn(shape[0], dtype=dtype), randn(shape[1]).exp()
    made = QuantizedWeight(weight, 8, importance, 32)
    outliers = importance.topk(32).indices.sort().values
    assert made.outliers is not None
    assert torch.equal(made.outliers.long(), outliers)
    numbers, scales = quantize_weight_reference(weight, 8)
    numbers = torch.cat((numbers, outlier_numbers_reference(weight, numbers, scales, made.outliers)), 1)
    for given in (None, bias):
        linear = QuantizedLinear(made, given, row_bits=16)
        for rows in (1, 2, 3, 4, 5, 9, 40, 67):
            x = 10 * randn(rows, shape[1] + 3, dtype=dtype)[:, 1:-2]
            expected = quantized_linear_reference(x, numbers, scales, given, 16, made.outliers)
            assert torch.equal(linear(x), expected), (rows, given is None)
            if shape[0] % 128 == 0:
                assert torch.equal(linear.gated(x), silu_mul(expected)), rows
    plain = QuantizedLinear(QuantizedWeight(weight, 8), row_bits=16)
    exact = QuantizedLinear(made, row_bits=16)
    only = torch.zeros(1, shape[1], dtype=dtype)
    only[0, outliers] = 1.0
    wanted = only.double() @ weight.double().t()
    errors = [float((one(only) - wanted).abs().mean()) for one in (exact, plain)]
    assert errors[0] < (0.1 if dtype is torch.float32 else 0.8) * errors[1], "what they were for"


def read_back(weight: QuantizedWeight) -> Tensor:
    dtype, weight.dtype = weight.dtype, torch.float32
    try:
        return numbers_of(weight)
    finally:
        weight.dtype = dtype


@needs_code
@pytest.mark.parametrize(("bits", "row_bits"), FORMATS)
@pytest.mark.parametrize("shape", [(576, 192), (100, 70)])
def test_many_rows_are_the_same_numbers(threads, randn, shape, bits, row_bits, path) -> None:
    """In float32 to the last bit, so that a row does not depend on how many there are."""
    weight, bias = QuantizedWeight(randn(*shape), bits), randn(shape[0])
    linear = QuantizedLinear(weight, bias, row_bits=row_bits)
    expected_of = partial(quantized_linear_reference, row_bits=row_bits)
    numbers, scales = read_back(weight), weight.scales[: shape[0]]
    for rows in (33, 100, 513):
        x = randn(rows, shape[1])
        assert torch.equal(linear(x), expected_of(x, numbers, scales, bias))
        assert torch.equal(linear(x)[:1], linear(x[:1]))
        weight.dtype = torch.bfloat16
        expected = expected_of(x.bfloat16(), numbers, scales, bias)
        assert torch.equal(linear(x.bfloat16()), expected)
        weight.dtype = torch.float32


@pytest.mark.drawn(60)
@needs_code
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("bits", "row_bits"), FORMATS)
@pytest.mark.parametrize("columns", [384, 2304, 320, 200])
def test_gates_are_the_parts_one_behind_the_other(
    threads, randn, columns, bits, row_bits, dtype, gates_path
) -> None:  # fmt: skip
    """To the last bit, with strips for every thread, with more of them for some, and with none."""
    weight, bias = QuantizedWeight(randn(columns, 96, dtype=dtype), bits), randn(columns, dtype=dtype)
    for given in (None, bias):
        linear = QuantizedLinear(weight, given, row_bits=row_bits)
        for rows in (0, 1, 2, 7, 119, 120, 250):
            x = randn(rows, 96 + 3, dtype=dtype)[:, 1:-2]
            assert torch.equal(linear.gated(x), silu_mul(linear(x))), (rows, given is None)


@pytest.mark.parametrize(("bits", "row_bits"), FORMATS)
def test_without_c_code_the_numbers_are_the_same(randn, bits, row_bits) -> None:
    """8 bits; those of 4 bits are searched in another order of additions, and are as good."""
    weight, x = randn(96, 64), randn(50, 64)
    make = partial(QuantizedLinear, row_bits=row_bits)
    ours = make(QuantizedWeight(weight, bits))
    was_on = native.enable(False)
    try:
        plain = make(QuantizedWeight(weight, bits))
        assert plain.weight.layout is None
        found = plain(x)
        assert plain(x[:0]).shape == (0, 96)
    finally:
        native.enable(was_on)
    if row_bits == 16:  # oneDNN's sums of two planes are rounded each
        torch.testing.assert_close(found, ours(x), atol=1e-5, rtol=1e-5)
    elif bits == 8:
        assert torch.equal(found, ours(x))
    exact = x @ weight.t()
    assert (found - exact).norm() < 1.02 * (ours(x) - exact).norm() < 1.1 * (found - exact).norm()


@pytest.mark.parametrize(("bits", "most"), [(8, 0.01), (4, 0.1)])
def test_quantising_gaussian_weights_loses_little(randn, bits, most) -> None:
    weight = randn(256, 1024)
    numbers, scales = quantize_weight_reference(weight, bits)
    found = (numbers * scales[:, None] - weight).norm() / weight.norm()
    assert most / 2 < found < most
    if LIBRARY.is_available():
        made = QuantizedWeight(weight, bits)
        by_code = (read_back(made) * made.scales[:256, None] - weight).norm() / weight.norm()
        assert float(by_code) == pytest.approx(float(found), rel=1e-3)


def test_4_bits_are_better_than_the_nearest_of_whole_steps(randn) -> None:
    """The usual way: a group's largest number is a 7. Searching the scale errs a tenth less, with outliers too."""
    weight = randn(128, 1024)
    weight[:, ::97] *= 6
    groups = weight.view(128, -1, 32)
    steps = groups.abs().amax(2, keepdim=True) / 7
    naive = ((groups / steps).round() * steps - groups).norm()
    numbers, scales = quantize_weight_reference(weight, 4)
    assert (numbers * scales[:, None] - weight).norm() < 0.92 * naive


@needs_code
def test_errors_of_important_columns_count_more(path, randn) -> None:
    """Inputs of which a few are ten times the others: products err less by a fifth. One beside zeros is no division."""
    weight, x = randn(96, 135), randn(400, 135)
    x[:, ::9] *= 10
    importance = x.square().mean(0)
    exact = x.double() @ weight.t().double()

    def error(numbers: Tensor, scales: Tensor) -> float:
        return float((x.double() @ (numbers * scales[:, None]).t().double() - exact).norm() / exact.norm())

    made = {by is None: QuantizedWeight(weight, 4, by) for by in (None, importance)}
    ours = {alike: error(numbers_of(one), one.scales[:96]) for alike, one in made.items()}
    assert ours[False] < 0.8 * ours[True]
    assert ours[False] == pytest.approx(error(*quantize_weight_reference(weight, 4, importance)), rel=0.02)
    alike = QuantizedWeight(weight, 4, torch.full((135,), 3.0))
    assert torch.equal(numbers_of(alike), numbers_of(made[True]))
    assert ours[True] == pytest.approx(error(*quantize_weight_reference(weight, 4)), rel=0.02)
    single = torch.full((135,), 1e-6)
    single[40] = 1.0
    assert QuantizedWeight(weight, 4, single).scales.isfinite().all()


@needs_code
@pytest.mark.parametrize("shape", [(96, 135), (67, 256), (3, 31)])
def test_numbers_make_good_the_errors_before_them(path, randn, shape: tuple[int, int]) -> None:
    """Inputs that go together, as a model's do: GPTQ's products err less by a quarter, as much as the reference's."""
    weight, mixing = randn(*shape), randn(shape[1] // 4, shape[1])
    x, unseen = (randn(4 * shape[1], len(mixing)) @ mixing + 0.1 * randn(4 * shape[1], shape[1]) for _ in range(2))
    moments = x.t() @ x / len(x)
    exact = unseen.double() @ weight.t().double()

    def error(numbers: Tensor, scales: Tensor) -> float:
        found = unseen.double() @ (numbers * scales[:, None]).t().double()
        return float((found - exact).norm() / exact.norm())

    squares = QuantizedWeight(weight, 4, moments.diagonal())
    made = QuantizedWeight(weight, 4, moments)
    ours = error(numbers_of(made), made.scales[: shape[0]])
    assert ours < 0.75 * error(numbers_of(squares), squares.scales[: shape[0]])
    reference = quantize_weight_reference(weight, 4, moments.diagonal(), error_feedback(moments))
    assert ours == pytest.approx(error(*reference), rel=0.05)


@needs_code
def test_inputs_that_do_not_go_together_change_no_number(path, randn) -> None:
    weight, squares = randn(96, 135), randn(135).exp()
    made = [QuantizedWeight(weight, 4, one) for one in (squares, torch.diag(squares))]
    assert torch.equal(*map(numbers_of, made))
    assert error_feedback(squares) is None
    assert error_feedback(torch.diag(squares).log()) is None, "not all finite"


def test_rows_are_from_minus_127_to_127_and_keep_their_error_bound(randn) -> None:
    x = randn(7, 100) * torch.tensor([1e-3, 1, 1e3, 1, 1, 1, 1])[:, None]
    x[3] = 0
    numbers, scales = quantize_rows_reference(x)
    assert numbers.abs().amax(1).tolist() == [127, 127, 127, 0, 127, 127, 127]
    assert ((numbers * scales[:, None] - x).abs() <= 0.5001 * scales[:, None]).all()


def test_rows_of_16_bits_are_two_of_8_and_err_by_a_256th_of_theirs(randn) -> None:
    x = randn(50, 300)
    x[:, 7] *= 100
    numbers, scales = quantize_rows_reference(x, 16)
    planes = planes_reference(numbers)
    assert planes.abs().max() <= 127
    assert torch.equal(255 * planes[::2].int() + planes[1::2], numbers.int())
    assert ((numbers * scales[:, None] - x).abs() <= 0.51 * scales[:, None]).all()
    ones, one_scales = quantize_rows_reference(x)
    assert (numbers * scales[:, None] - x).norm() < (ones * one_scales[:, None] - x).norm() / 250


def test_a_large_activation_costs_rows_of_16_bits_nothing(randn) -> None:
    """One a hundred times the others leaves rows of 8 bits with one digit, which is what real models have."""
    weight, x = randn(96, 512), randn(20, 512)
    x[:, 5] *= 100
    weight[:, 5] = 0
    made, exact = QuantizedWeight(weight, 8), x @ weight.t()
    error = {bits: float((QuantizedLinear(made, row_bits=bits)(x) - exact).norm() / exact.norm()) for bits in (8, 16)}
    assert error[8] > 0.1
    assert error[16] < 0.01


@pytest.mark.parametrize(("bits", "row_bits"), FORMATS)
@pytest.mark.parametrize("rows", [1, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_and_what_is_not_finite(randn, dtype, bits, row_bits, rows) -> None:
    weight = randn(80, 40, dtype=dtype)
    weight[3] = 0
    weight[5] = 1e-35
    linear = QuantizedLinear(QuantizedWeight(weight, bits), row_bits=row_bits)
    x = randn(rows, 40, dtype=dtype)
    assert not linear(x)[:, [3, 5]].any()
    assert not linear(torch.zeros_like(x)).any()
    for odd in (torch.inf, -torch.inf, torch.nan):
        x[-1, 7] = odd
        assert linear(x)[-1].isnan().any(), odd
        assert linear(x)[:-1].isfinite().all()


def test_memory_is_what_was_planned(randn) -> None:
    """Of 4 bits a little over half a byte a number; no copy of the weight is kept."""
    assert packed_bytes(1024, 4096, 4) == 1024 * 4096 * 18 // 32 + 8 * 1024
    assert packed_bytes(1000, 4096, 8) == 1024 * 4096 + 8 * 1024
    made = QuantizedWeight(randn(1000, 130), 4)
    if made._kept is not None and made.sums is not None:
        assert made._kept.nbytes + made.sums.nbytes + made.scales.nbytes == packed_bytes(1000, 130, 4)


def test_wrong_weights_are_refused(randn) -> None:
    with pytest.raises(TypeError, match="float16"):
        QuantizedWeight(randn(8, 8, dtype=torch.float16), 8)
    with pytest.raises(ValueError, match="65536"):
        QuantizedWeight(torch.zeros(1, (1 << 16) + 1), 8)
    for bits, inner, outliers in ((4, 64, 32), (8, 31, 32), (8, 64, 16), (8, 1 << 16, 32)):
        with pytest.raises(ValueError):
            QuantizedWeight(torch.zeros(1, inner), bits, None, outliers)
