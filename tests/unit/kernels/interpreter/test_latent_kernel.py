"""The Triton decode kernel over latents against the torch reference, in the interpreter."""

from dataclasses import replace

import pytest
import torch

from tandem.kernels.kv_store import kv_store
from tandem.kernels.latent_decode import latent_decode
from tandem.kernels.layer_view import key_value_view

TOLERANCE = {torch.float32: 3e-6, torch.float16: 4e-3}


def latents(paged, lens, width, *, block_tokens=16, dtype=torch.float32):
    """Rows that are keys and values; the second plane of the pool is not there to be read."""
    made = paged(lens, kv_heads=1, width=width, block_tokens=block_tokens, dtype=dtype)
    pool = made.pool[:, :, :1].clone()
    return replace(made, values=made.keys, pool=pool, layer_view=key_value_view(pool[:, 1]))


def check(case, q, rank) -> None:
    arguments = (q, case.layer_view, case.block_table, case.context_lens)
    expected = latent_decode(*arguments, rank=rank, scale=0.2, backend="reference")
    actual = latent_decode(*arguments, rank=rank, scale=0.2, backend="triton")
    tolerance = TOLERANCE[q.dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("heads", [2, 16])
def test_decode(paged, randn, dtype, heads) -> None:
    check(latents(paged, [1, 16, 70], 48, dtype=dtype), randn(3, heads, 48, dtype=dtype), 32)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33, 65])
def test_at_the_edges_of_blocks_tiles_and_splits(paged, randn, length) -> None:
    check(latents(paged, [length], 48, block_tokens=4), randn(1, 2, 48), 32)


@pytest.mark.parametrize(("computed", "stored"), [(torch.float32, torch.bfloat16), (torch.float16, torch.float32)])
def test_a_pool_of_another_dtype(paged, randn, computed, stored) -> None:
    check(latents(paged, [7, 40], 48, dtype=stored), randn(2, 4, 48, dtype=computed), 32)


@pytest.mark.parametrize(("heads", "rank", "width", "block_tokens"), [(3, 24, 30, 8), (20, 16, 32, 1), (1, 40, 44, 32)])
def test_shapes_that_are_no_powers_of_two(paged, randn, heads, rank, width, block_tokens) -> None:
    check(latents(paged, [35], width, block_tokens=block_tokens), randn(1, heads, width), rank)


@pytest.mark.parametrize("splits", [1, 3, 7])
def test_splits_and_padding_rows(paged, randn, monkeypatch, splits) -> None:
    """A split may end inside a block, or have no tile; a padding row has no token at all."""
    from tandem.kernels.latent_decode import triton as decode

    monkeypatch.setattr(decode, "decode_splits", lambda *_: splits)
    case, q = latents(paged, [0, 70, 17], 48), randn(3, 2, 48)
    check(case, q, 32)
    out = latent_decode(
        q, case.layer_view, case.block_table, case.context_lens, rank=32, scale=0.2, backend="triton"
    )  # fmt: skip
    assert not out[0].any()


def test_queries_may_be_strided(paged, randn) -> None:
    check(latents(paged, [9, 34], 48), randn(2, 4, 96)[..., 16:64], 32)


def test_several_tiles_of_heads(paged, randn, monkeypatch) -> None:
    from tandem.kernels import triton_tiles

    case = latents(paged, [20], 48)
    check(case, randn(1, 40, 48), 32)  # rows of four bytes: 16 heads a program
    monkeypatch.setattr(triton_tiles, "LATENT_TILES", {16: (16, 4, 2, 2), 32: (16, 4, 2, 1)})
    check(latents(paged, [20], 48, dtype=torch.float16), randn(1, 40, 48, dtype=torch.float16), 32)


def test_rows_are_stored_once_for_keys_and_values(randn) -> None:
    pool = torch.full((4, 3, 1, 1, 16, 48), -1.0)
    rows, slots = randn(3, 1, 48), torch.tensor([5, -1, 33])
    kv_store(rows, rows, key_value_view(pool[:, 1]), slots, backend="triton")
    assert torch.equal(pool[0, 1, 0, 0, 5], rows[0, 0])
    assert torch.equal(pool[2, 1, 0, 0, 1], rows[2, 0])
    assert int((pool != -1.0).any(-1).sum()) == 2
