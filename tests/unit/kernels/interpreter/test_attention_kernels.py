"""The Triton decode and extend kernels against the torch references, in the interpreter."""

import pytest
import torch

from tandem.kernels.extend_attention import extend_attention
from tandem.kernels.paged_decode import paged_decode

TOLERANCE = {torch.float32: 3e-6, torch.float16: 4e-3}


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


def check_decode(case, q, **options) -> None:
    arguments = (q, case.layer_view, case.block_table, case.context_lens)
    expected = paged_decode(*arguments, backend="reference", **options)
    close(paged_decode(*arguments, backend="triton", **options), expected)


def check_extend(case, q, starts, **options) -> None:
    cu_seqlens = torch.tensor(starts, dtype=torch.int32)
    arguments = (q, case.layer_view, cu_seqlens, case.block_table, case.context_lens)
    expected = extend_attention(*arguments, backend="reference", **options)
    close(extend_attention(*arguments, backend="triton", **options), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("group", [1, 2, 4])
def test_decode(paged, randn, dtype, group) -> None:
    case = paged([1, 16, 37], dtype=dtype)
    check_decode(case, randn(3, 2 * group, 16, dtype=dtype), scale=0.25)


@pytest.mark.parametrize(
    ("computed", "stored"),
    [(torch.float32, torch.float16), (torch.float16, torch.float32), (torch.float32, torch.bfloat16)],
)
@pytest.mark.parametrize("splits", [1, 4])
def test_a_pool_of_another_dtype(paged, randn, monkeypatch, computed, stored, splits) -> None:
    from tandem.kernels.paged_decode import triton as decode

    monkeypatch.setattr(decode, "decode_splits", lambda *_: splits)
    case = paged([7, 40, 33], dtype=stored)
    check_decode(case, randn(3, 4, 16, dtype=computed), scale=0.25)
    check_extend(case, randn(20, 4, 16, dtype=computed), [0, 7, 8, 20], scale=0.25)


@pytest.mark.parametrize("length", [1, 4, 15, 16, 17, 31, 32, 33, 64, 65])
def test_decode_at_the_edges_of_blocks_tiles_and_splits(paged, randn, length) -> None:
    case = paged([length], kv_heads=1)
    check_decode(case, randn(1, 2, 16), scale=0.25)


@pytest.mark.parametrize("options", [{"softcap": 2.0}, {"window": 1}, {"window": 16}, {"window": 21, "softcap": 5.0}])
def test_decode_options(paged, randn, options) -> None:
    case = paged([40, 9], kv_heads=1)
    check_decode(case, randn(2, 2, 16), scale=0.25, **options)


@pytest.mark.parametrize("window", [3, 17, 30])
def test_decode_never_reads_blocks_that_left_the_window(paged, randn, window) -> None:
    case = paged([61], kv_heads=1).without_blocks_before(window)
    check_decode(case, randn(1, 2, 16), scale=0.25, window=window)


@pytest.mark.parametrize("splits", [1, 2])
def test_decode_padding_row_is_zero(paged, randn, monkeypatch, splits) -> None:
    from tandem.kernels.paged_decode import triton as decode

    monkeypatch.setattr(decode, "decode_splits", lambda *_: splits)
    case = paged([0, 20], kv_heads=1)
    q = randn(2, 2, 16)
    out = paged_decode(q, case.layer_view, case.block_table, case.context_lens, scale=0.25, backend="triton")
    assert not out[0].any()
    check_decode(case, q, scale=0.25)


@pytest.mark.parametrize("splits", [1, 4])
def test_decode_with_one_split_and_with_more_than_there_are_tiles(paged, randn, monkeypatch, splits) -> None:
    from tandem.kernels.paged_decode import triton as decode

    monkeypatch.setattr(decode, "decode_splits", lambda *_: splits)
    case = paged([20, 50], kv_heads=1)
    check_decode(case, randn(2, 3, 16), scale=0.25)


@pytest.mark.parametrize(("kv_heads", "group", "width", "block_tokens"), [(1, 3, 24, 8), (3, 1, 32, 32), (1, 20, 8, 1)])
def test_shapes_that_are_no_powers_of_two(paged, randn, kv_heads, group, width, block_tokens) -> None:
    case = paged([35], kv_heads=kv_heads, width=width, block_tokens=block_tokens)
    check_decode(case, randn(1, kv_heads * group, width), scale=0.25)
    check_extend(case, randn(9, kv_heads * group, width), [0, 9], scale=0.25)


def test_queries_may_be_a_strided_slice_of_a_fused_projection(paged, randn) -> None:
    case = paged([9, 14], kv_heads=1)
    q = randn(2, 96)[:, 32:64].view(2, 2, 16)
    check_decode(case, q, scale=0.25)
    check_extend(case, q, [0, 1, 2], scale=0.25)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("group", [1, 2, 4])
def test_extend(paged, randn, dtype, group) -> None:
    lens, starts = [7, 1, 40, 33], [0, 7, 8, 20, 20]
    case = paged(lens, dtype=dtype)
    check_extend(case, randn(20, 2 * group, 16, dtype=dtype), starts, scale=0.25)


@pytest.mark.parametrize(("length", "count"), [(16, 16), (17, 17), (32, 1), (33, 2), (48, 17), (31, 31)])
def test_extend_at_the_edges_of_blocks_and_tiles(paged, randn, length, count) -> None:
    case = paged([length], kv_heads=1)
    check_extend(case, randn(count, 2, 16), [0, count], scale=0.25)


@pytest.mark.parametrize("options", [{"softcap": 2.0}, {"window": 1}, {"window": 16}, {"window": 21, "softcap": 5.0}])
def test_extend_options(paged, randn, options) -> None:
    case = paged([40, 9], kv_heads=1)
    check_extend(case, randn(21, 2, 16), [0, 12, 21], scale=0.25, **options)


@pytest.mark.parametrize("window", [3, 17])
def test_extend_never_reads_blocks_that_left_the_window_of_its_first_query(paged, randn, window) -> None:
    count = 10
    case = paged([61], kv_heads=1).without_blocks_before(window + count - 1)
    check_extend(case, randn(count, 2, 16), [0, count], scale=0.25, window=window)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("options", [{}, {"window": 21, "softcap": 5.0}])
def test_sinks(paged, randn, monkeypatch, splits, options) -> None:
    from tandem.kernels.paged_decode import triton as decode

    monkeypatch.setattr(decode, "decode_splits", lambda *_: splits)
    sinks = torch.tensor([-200.0, 0.5, 2.0, 20.0, -1.0, 0.0])
    case = paged([40, 0, 9])
    check_decode(case, randn(3, 6, 16), scale=0.25, sinks=sinks, **options)
    case = paged([40, 9])
    check_extend(case, randn(21, 6, 16), [0, 12, 21], scale=0.25, sinks=sinks, **options)


@pytest.mark.parametrize("block_tokens", [16, 32, 64])
@pytest.mark.parametrize("splits", [1, 3, 7])
def test_key_tiles_and_splits_know_nothing_of_blocks(paged, randn, monkeypatch, block_tokens, splits) -> None:
    """Tiles of 16 keys: a block is one of them, two or four; a split may end inside a block, or have no tile."""
    from tandem.kernels.paged_decode import triton as decode

    monkeypatch.setattr(decode, "decode_splits", lambda *_: splits)
    case = paged([70, 17], kv_heads=1, block_tokens=block_tokens)
    check_decode(case, randn(2, 2, 16), scale=0.25)


@pytest.mark.parametrize("block_tokens", [16, 32, 64])
def test_extend_tiles_know_nothing_of_blocks(paged, randn, block_tokens) -> None:
    case = paged([70, 17], kv_heads=1, block_tokens=block_tokens)
    check_extend(case, randn(30, 2, 16), [0, 20, 30], scale=0.25)


def test_a_tile_may_be_larger_than_a_block_or_smaller(paged, randn, monkeypatch) -> None:
    from tandem.kernels import triton_tiles

    for tile in (16, 64):
        monkeypatch.setattr(triton_tiles, "DECODE_TILES", {64: (2 * tile, 4, 2)})
        case = paged([100], kv_heads=1, block_tokens=32)
        check_decode(case, randn(1, 2, 16), scale=0.25)


def test_tiles_of_real_size(paged, randn, monkeypatch) -> None:
    from tandem.kernels import triton_tiles

    monkeypatch.undo()
    assert triton_tiles.extend_tile(64, 2, 4) == (32, 32, 4, 3)
    assert triton_tiles.decode_tile(64, 4) == (64, 4, 3)
    case = paged([150, 33], kv_heads=1, width=32)
    check_decode(case, randn(2, 2, 32), scale=0.25)
    check_extend(case, randn(41, 2, 32), [0, 20, 41], scale=0.25)
    check_decode(case, randn(2, 2, 32), scale=0.25, window=70, softcap=5.0)
    check_extend(case, randn(41, 2, 32), [0, 20, 41], scale=0.25, window=70, softcap=5.0)
