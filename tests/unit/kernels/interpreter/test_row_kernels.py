"""The Triton kernels of norms, rotations and gates against the torch references, in the interpreter."""

import pytest
import torch

from tandem.kernels.rms_norm import rms_norm
from tandem.kernels.rope import rotate
from tandem.kernels.silu_mul import silu_mul

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 3e-2}
"""For bfloat16 the interpreter cuts bits off where a device rounds: several units in the last place."""


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 16, 33, 576])
def test_rms_norm(randn, width, dtype) -> None:
    x, weight = 3 * randn(3, width, dtype=dtype), randn(width, dtype=dtype)
    before = x.clone()
    close(rms_norm(x, weight, 1e-5, backend="triton"), rms_norm(before, weight, 1e-5, backend="reference"))
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 33])
def test_rms_norm_of_a_sum_writes_the_sum_back(randn, width, dtype) -> None:
    fused, added, weight = randn(3, 2 * width, dtype=dtype), randn(3, width, dtype=dtype), randn(width, dtype=dtype)
    x, rest = fused[:, :width], fused[:, width:].clone()
    summed, kept = x + added, added.clone()
    expected = rms_norm(summed.clone(), weight, 1e-6, backend="reference")
    close(rms_norm(x, weight, 1e-6, added=added, backend="triton"), expected)
    close(x, summed)
    assert torch.equal(added, kept)
    assert torch.equal(fused[:, width:], rest)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "width"), [(3, 16), (4, 10), (1, 32)])
def test_rotate(randn, heads, width, dtype) -> None:
    fused, table = randn(3, (heads + 1) * width, dtype=dtype), randn(3, 2, width, dtype=dtype)
    x, (cos, sin) = fused[:, : heads * width].view(3, heads, width), table.unbind(1)
    rest = fused[:, heads * width :].clone()
    expected = rotate(x.clone(), cos, sin, backend="reference")
    close(rotate(x, cos, sin, backend="triton"), expected)
    assert torch.equal(fused[:, heads * width :], rest)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 30, 1100])
def test_silu_mul(randn, width, dtype) -> None:
    gate_up = 5 * randn(2, 2 * width, dtype=dtype)
    before = gate_up.clone()
    close(silu_mul(gate_up, backend="triton"), silu_mul(gate_up, backend="reference"))
    assert torch.equal(gate_up, before)


def test_silu_of_large_numbers_is_no_nan() -> None:
    gate_up = torch.tensor([[120.0, -120.0, 0.0, 1.0, 1.0, 1.0]])
    assert silu_mul(gate_up, backend="triton")[0].tolist() == pytest.approx([120.0, 0.0, 0.0], abs=1e-20)


def test_layouts_that_a_kernel_does_not_take_go_to_the_reference(randn) -> None:
    x, weight = randn(8, 3).t(), randn(8)
    close(rms_norm(x, weight, 1e-5, backend="triton"), rms_norm(x.contiguous(), weight, 1e-5, backend="reference"))
    turned, cos, sin = randn(2, 16, 3).transpose(1, 2), randn(2, 16), randn(2, 16)
    close(rotate(turned, cos, sin, backend="triton"), rotate(turned.contiguous(), cos, sin, backend="reference"))


def test_no_rows(randn) -> None:
    assert rms_norm(randn(0, 16), randn(16), 1e-5, backend="triton").shape == (0, 16)
    assert rotate(randn(0, 2, 16), randn(0, 16), randn(0, 16), backend="triton").shape == (0, 2, 16)
    assert silu_mul(randn(0, 32), backend="triton").shape == (0, 16)
