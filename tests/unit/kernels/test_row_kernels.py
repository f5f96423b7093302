"""The C code of norms, rotations and gates against torch, on every instruction set that this machine has."""

from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional

from tandem.core.cpu_level import CpuLevel
from tandem.kernels.kv_store import LIBRARY as KV_STORE
from tandem.kernels.rms_norm import LIBRARY as RMS_NORM
from tandem.kernels.rms_norm import rms_norm
from tandem.kernels.rope import LIBRARY as ROTATE
from tandem.kernels.rope import rotate
from tandem.kernels.silu_mul import LIBRARY as SILU_MUL
from tandem.kernels.silu_mul import silu_mul
from tests.unit.kernels.levels import paths_of, threads_of

LIBRARIES = (RMS_NORM, ROTATE, SILU_MUL, KV_STORE)
PATHS = ["", *paths_of(RMS_NORM, CpuLevel.AVX2, CpuLevel.AVX512)]
ROWS = [1, 5, 300]
"""The last is enough for several threads."""
DTYPES = [torch.float32, torch.bfloat16]
threads = threads_of(1, 2, autouse=True)


@pytest.fixture(params=PATHS, autouse=True)
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """Without C code there is one path, torch, and the tests hold for it, too."""
    for library in LIBRARIES:
        assert library.choose_path(request.param) or not library.is_available()
    yield request.param
    for library in LIBRARIES:
        library.choose_path("")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [16, 48, 576])
def test_rms_norm(randn, rows, width, dtype) -> None:
    x, weight = 3 * randn(rows, width, dtype=dtype), randn(width, dtype=dtype)
    expected = (functional.rms_norm(x.double(), [width], None, 1e-5).to(dtype).double() * weight.double()).to(dtype)
    before = x.clone()
    tolerance = 2e-6 if dtype is torch.float32 else 1.6e-2
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
def test_rms_norm_of_a_sum_writes_the_sum_back(randn, rows, dtype) -> None:
    x, added, weight = randn(rows, 96, dtype=dtype), randn(rows, 96, dtype=dtype), randn(96, dtype=dtype)
    summed, kept = x + added, added.clone()
    expected = rms_norm(summed, weight, 1e-6)
    assert torch.equal(rms_norm(x, weight, 1e-6, added=added), expected)
    assert torch.equal(x, summed)
    assert torch.equal(added, kept)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
def test_silu_mul(randn, rows, dtype) -> None:
    gate_up = 20 * randn(rows, 2 * 112, dtype=dtype)
    gate_up[0, :3] = torch.tensor([0.0, 95.0, -95.0])
    before = gate_up.clone()
    gate, up = gate_up.double().chunk(2, -1)
    expected = (functional.silu(gate).to(dtype).double() * up).to(dtype)
    tolerance = 1e-6 if dtype is torch.float32 else 1.6e-2
    torch.testing.assert_close(silu_mul(gate_up), expected, atol=1e-30, rtol=tolerance)
    assert torch.equal(gate_up, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [32, 64, 48])
def test_rotate_is_torchs_bit_for_bit(randn, rows, width, dtype) -> None:
    fused, table = randn(rows, 9 * width, dtype=dtype), randn(rows, 2, width, dtype=dtype)
    x, (cos, sin) = fused[:, : 7 * width].view(rows, 7, width), table.unbind(1)
    rest = fused[:, 7 * width :].clone()
    expected = rotate(x, cos, sin, backend="reference")
    assert torch.equal(rotate(x, cos, sin), expected)
    assert torch.equal(fused[:, 7 * width :], rest)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_no_number_stays_none(randn, dtype) -> None:
    x, weight = randn(2, 32, dtype=dtype), randn(32, dtype=dtype)
    x[1, 3] = float("nan")
    assert rms_norm(x, weight, 1e-5)[1].isnan().all()
    assert silu_mul(x)[1].isnan().sum() == 1
    cos, sin = torch.ones(2, 32, dtype=dtype), torch.ones(2, 32, dtype=dtype)
    assert rotate(x.view(2, 1, 32), cos, sin)[1].isnan().sum() == 2


def test_arguments_that_do_not_fit_are_named(randn) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        rms_norm(randn(2, 32), randn(16), 1e-5)
    with pytest.raises(ValueError, match="do not fit"):
        rms_norm(randn(2, 32), randn(32), 1e-5, added=randn(1, 32))
    with pytest.raises(TypeError, match=r"weight torch\.bfloat16"):
        rms_norm(randn(2, 32), randn(32).bfloat16(), 1e-5)
    with pytest.raises(ValueError, match="gate_up"):
        silu_mul(randn(2, 33))
    with pytest.raises(ValueError, match="do not fit"):
        rotate(randn(2, 3, 32), randn(2, 16), randn(2, 16))
    with pytest.raises(TypeError, match=r"cos torch\.bfloat16"):
        rotate(randn(2, 3, 32), randn(2, 32).bfloat16(), randn(2, 32))
