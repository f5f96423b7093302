"""The torch reference of block gather, scatter and copy."""

import pytest
import torch

from tandem.kernels.kv_blocks import copy_blocks, gather_blocks, scatter_blocks

RANGES = [
    (slice(None), slice(None)),
    (slice(1, 3), slice(None)),
    (slice(None), slice(1, 2)),
    (slice(2, 3), slice(0, 3)),
]


@pytest.fixture
def pool(randn):
    return randn(9, 3, 2, 4, 4, 8)


@pytest.mark.parametrize(("layers", "heads"), RANGES)
def test_gather_takes_the_blocks_in_order(pool, layers, heads) -> None:
    ids = torch.tensor([7, 0, 3, 7], dtype=torch.int32)
    staging = gather_blocks(pool, ids, layers, heads)
    assert staging.is_contiguous()
    for row, block in zip(staging, ids.tolist(), strict=True):
        assert torch.equal(row, pool[block, layers][:, :, heads])


@pytest.mark.parametrize(("layers", "heads"), RANGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_scatter_writes_the_part_and_nothing_else(randn, layers, heads, dtype) -> None:
    pool = (randn(9, 3, 2, 4, 4, 8) * 50 + 100).to(dtype)
    ids = torch.tensor([5, 1], dtype=torch.int32)
    staging = (gather_blocks(pool, ids, layers, heads).float() + 1).to(dtype)
    expected = pool.clone()
    for row, block in zip(staging, ids.tolist(), strict=True):
        expected[block, layers, :, heads] = row
    scatter_blocks(pool, ids, staging, layers, heads)
    assert torch.equal(pool, expected)


def test_split_by_heads_gathered_apart_is_the_whole(pool) -> None:
    ids = torch.tensor([2, 8], dtype=torch.int32)
    halves = [gather_blocks(pool, ids, slice(None), slice(low, low + 2)) for low in (0, 2)]
    assert torch.equal(torch.cat(halves, 3), gather_blocks(pool, ids))


def test_copy_blocks(pool) -> None:
    before = pool.clone()
    copy_blocks(pool, torch.tensor([1, 1, 4], dtype=torch.int32), torch.tensor([0, 8, 2], dtype=torch.int32))
    order = [1, 1, 4, 3, 4, 5, 6, 7, 1]
    assert torch.equal(pool, before[order])


def test_nothing_to_move(pool) -> None:
    nothing = torch.empty(0, dtype=torch.int32)
    assert gather_blocks(pool, nothing).shape == (0, 3, 2, 4, 4, 8)
    scatter_blocks(pool, nothing, gather_blocks(pool, nothing))
    copy_blocks(pool, nothing, nothing)


def test_arguments_that_do_not_fit_are_named(pool) -> None:
    ids = torch.tensor([1], dtype=torch.int32)
    with pytest.raises(ValueError, match="contiguous"):
        gather_blocks(pool[:, 1:], ids)
    with pytest.raises(TypeError, match="int32"):
        gather_blocks(pool, ids.long())
    with pytest.raises(ValueError, match="step 1"):
        gather_blocks(pool, ids, slice(0, 3, 2))
    with pytest.raises(ValueError, match="empty"):
        gather_blocks(pool, ids, slice(3, 5))
    with pytest.raises(ValueError, match="staging"):
        scatter_blocks(pool, ids, pool[:2])
    with pytest.raises(TypeError, match="staging"):
        scatter_blocks(pool, ids, pool[:1].half())
    with pytest.raises(ValueError, match="2 destinations"):
        copy_blocks(pool, ids, torch.tensor([2, 3], dtype=torch.int32))
    with pytest.raises(IndexError):
        gather_blocks(pool, torch.tensor([9], dtype=torch.int32))
