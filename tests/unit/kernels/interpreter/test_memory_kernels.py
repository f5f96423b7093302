"""The Triton kernels that move keys and values against the torch references, in the interpreter: every bit."""

import pytest
import torch

from tandem.kernels.kv_blocks import copy_blocks, gather_blocks, scatter_blocks
from tandem.kernels.kv_store import kv_store
from tandem.kernels.payload_checksum import payload_checksum


def equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("kv_heads", "width"), [(2, 16), (3, 12)])
def test_kv_store(paged, randn, dtype, kv_heads, width) -> None:
    case = paged([5, 2], kv_heads=kv_heads, width=width, dtype=dtype)
    fused = randn(7, 2 * kv_heads * width + 8, dtype=dtype)
    k = fused[:, 8 : 8 + kv_heads * width].view(7, kv_heads, width)
    v = fused[:, 8 + kv_heads * width :].view(7, kv_heads, width)
    slots = torch.tensor([slot for i in range(2) for slot in case.slots(i)])
    slots[2] = -1
    expected = case.pool.clone()
    kv_store(k, v, expected[:, 1], slots, backend="reference")
    kv_store(k, v, case.layer_view, slots, backend="triton")
    equal(case.pool, expected)


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("computed", [torch.float32, torch.float16, torch.bfloat16])
def test_kv_store_in_another_dtype(paged, randn, stored, computed) -> None:
    case = paged([7], dtype=stored)
    k, v = randn(7, 2, 16, dtype=computed), randn(7, 2, 16, dtype=computed)
    slots = torch.tensor(case.slots(0))
    expected = case.pool.clone()
    kv_store(k, v, expected[:, 1], slots, backend="reference")
    kv_store(k, v, case.layer_view, slots, backend="triton")
    if stored is torch.bfloat16 is not computed:  # the interpreter cuts the bits off; a device rounds (tests/gpu)
        torch.testing.assert_close(case.pool, expected, rtol=2**-7, atol=0, equal_nan=True)
    else:
        equal(case.pool, expected)


def test_kv_store_of_no_tokens(paged, randn) -> None:
    case = paged([4])
    kv_store(randn(0, 2, 16), randn(0, 2, 16), case.layer_view, torch.empty(0, dtype=torch.int64), backend="triton")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize(("layers", "heads"), [(slice(None), slice(None)), (slice(1, 3), slice(1, 3))])
def test_gather_and_scatter(randn, dtype, layers, heads) -> None:
    pool = (randn(6, 3, 2, 3, 5, 8) * 50 + 100).to(dtype)
    ids = torch.tensor([4, 0, 5], dtype=torch.int32)
    staging = gather_blocks(pool, ids, layers, heads, backend="triton")
    equal(staging, gather_blocks(pool, ids, layers, heads, backend="reference"))
    target, expected = torch.zeros_like(pool), torch.zeros_like(pool)
    scatter_blocks(target, ids, staging, layers, heads, backend="triton")
    scatter_blocks(expected, ids, staging, layers, heads, backend="reference")
    equal(target, expected)


def test_runs_longer_than_a_chunk(randn, monkeypatch) -> None:
    from tandem.kernels.kv_blocks import triton as kernel

    monkeypatch.setattr(kernel, "_CHUNK_BYTES", 128)
    pool = randn(4, 1, 2, 3, 5, 8)
    ids = torch.tensor([3, 1], dtype=torch.int32)
    equal(gather_blocks(pool, ids, backend="triton"), gather_blocks(pool, ids, backend="reference"))
    expected = pool.clone()
    copy_blocks(expected, ids, torch.tensor([0, 2], dtype=torch.int32), backend="reference")
    copy_blocks(pool, ids, torch.tensor([0, 2], dtype=torch.int32), backend="triton")
    equal(pool, expected)


def test_nothing_to_move(randn) -> None:
    pool = randn(2, 1, 2, 1, 4, 8)
    nothing = torch.empty(0, dtype=torch.int32)
    assert gather_blocks(pool, nothing, backend="triton").shape == (0, 1, 2, 1, 4, 8)
    scatter_blocks(pool, nothing, pool[:0], backend="triton")
    copy_blocks(pool, nothing, nothing, backend="triton")


@pytest.mark.parametrize("size", [0, 1, 2, 2047, 8191, 8192, 8193, 50_001])
def test_payload_checksum(size: int) -> None:
    data = torch.randint(256, (size,), dtype=torch.uint8)
    expected = payload_checksum(data, backend="reference")
    assert payload_checksum(data, backend="triton") == expected
    full = torch.full((size,), 255, dtype=torch.uint8)
    assert payload_checksum(full, backend="triton") == payload_checksum(full, backend="reference")
