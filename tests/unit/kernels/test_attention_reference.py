"""The torch references of decode and extend attention against a naive dense oracle."""

from typing import Any

import pytest
import torch

import tandem.kernels.extend_attention.reference as extend_reference
import tandem.kernels.paged_decode.reference as decode_reference
from tandem.kernels import backend
from tandem.kernels.extend_attention import extend_attention
from tandem.kernels.paged_decode import paged_decode

OPTIONS = [
    pytest.param({}, id="plain"),
    pytest.param({"window": 1}, id="window-1"),
    pytest.param({"window": 7}, id="window-7"),
    pytest.param({"softcap": 2.0}, id="softcap"),
    pytest.param({"window": 9, "softcap": 3.0}, id="window-softcap"),
]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture(autouse=True)
def reference_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_chosen", backend.REFERENCE)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("group", [1, 2, 4])
def test_decode_matches_dense_attention(paged, expected_attention, randn, dtype, options, group) -> None:
    lens = [1, 3, 4, 5, 8, 31, 33, 200, 1]
    case = paged(lens, dtype=dtype)
    q = randn(len(lens), 2 * group, 16, dtype=dtype)
    out = paged_decode(q, case.layer_view, case.block_table, case.context_lens, scale=0.25, **options)
    close(out, expected_attention(q, list(range(len(lens) + 1)), case, scale=0.25, **options))


@pytest.mark.parametrize(
    ("computed", "stored"),
    [(torch.float32, torch.float16), (torch.float16, torch.float32), (torch.bfloat16, torch.float16),
     (torch.float32, torch.bfloat16)],
)  # fmt: skip
@pytest.mark.parametrize("options", OPTIONS)
def test_a_pool_of_another_dtype_is_computed_in_that_of_the_queries(
    paged, expected_attention, randn, computed, stored, options
) -> None:
    lens, starts = [3, 33, 50, 200], [0, 1, 13, 20, 120]
    case = paged(lens, dtype=stored)
    q = randn(4, 4, 16, dtype=computed)
    out = paged_decode(q, case.layer_view, case.block_table, case.context_lens, scale=0.25, **options)
    assert out.dtype is computed
    close(out, expected_attention(q, [0, 1, 2, 3, 4], case, scale=0.25, **options))
    q = randn(120, 4, 16, dtype=computed)
    cu_seqlens = torch.tensor(starts, dtype=torch.int32)
    out = extend_attention(q, case.layer_view, cu_seqlens, case.block_table, case.context_lens, scale=0.25, **options)
    close(out, expected_attention(q, starts, case, scale=0.25, **options))


@pytest.mark.parametrize("lens", [[6], [8, 8, 8], [40, 41], [0, 5, 0], [300, 5, 290, 4]])
def test_decode_batches_of_any_lengths(paged, expected_attention, randn, lens) -> None:
    case = paged(lens)
    q = randn(len(lens), 4, 16)
    out = paged_decode(q, case.layer_view, case.block_table, case.context_lens, scale=0.3)
    used = [i for i, length in enumerate(lens) if length]
    for i in used:
        close(out[i : i + 1], expected_attention(q[i : i + 1], [0, 1], case.only(i), scale=0.3))
    for i in set(range(len(lens))) - set(used):
        assert not out[i].any()


@pytest.mark.parametrize("window", [None, 50])
def test_decode_in_spans(paged, expected_attention, randn, monkeypatch, window) -> None:
    monkeypatch.setattr(decode_reference, "_GATHERED_BYTES", 16 * 2 * 2 * 16 * 4)
    case = paged([130, 20, 97])
    q = randn(3, 4, 16)
    out = paged_decode(q, case.layer_view, case.block_table, case.context_lens, scale=0.3, window=window)
    close(out, expected_attention(q, [0, 1, 2, 3], case, scale=0.3, window=window))


def test_similar_lengths_wastes_little_and_loses_nobody() -> None:
    lens = [1000, 10, 0, 990, 12, 600, 1000]

    def split(lens: list[int], window: int | None = None, budget: int = 1 << 20, batch: int = 100) -> list[list[int]]:
        return list(decode_reference.similar_lengths(lens, window, budget, batch))

    assert split(lens) == [[0, 3, 6], [5], [1, 4]]
    assert split(lens, batch=10_000) == [[0, 1, 3, 4, 5, 6]]
    assert split(lens, window=8) == [[0, 1, 3, 4, 5, 6]]
    assert split([700, 700], budget=1000) == [[0], [1]]
    assert split([300, 300, 300], budget=1000) == [[0, 1, 2]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("group", [1, 2, 4])
def test_extend_matches_dense_attention(paged, expected_attention, randn, dtype, options, group) -> None:
    lens, counts = [5, 1, 40, 33, 12], [5, 1, 7, 0, 4]
    case = paged(lens, dtype=dtype)
    starts = [0, *torch.tensor(counts).cumsum(0).tolist()]
    q = randn(starts[-1], 2 * group, 16, dtype=dtype)
    cu_seqlens = torch.tensor(starts, dtype=torch.int32)
    out = extend_attention(q, case.layer_view, cu_seqlens, case.block_table, case.context_lens, scale=0.25, **options)
    close(out, expected_attention(q, starts, case, scale=0.25, **options))


@pytest.mark.parametrize("window", [None, 5, 45])
def test_extend_in_spans_and_tiles(paged, expected_attention, randn, monkeypatch, window) -> None:
    monkeypatch.setattr(extend_reference, "_GATHERED_BYTES", 24 * 2 * 2 * 16 * 4)
    monkeypatch.setattr(extend_reference, "_TILE_TOKENS", (8, 8))
    case = paged([100, 61])
    q = randn(60 + 61, 4, 16)
    cu_seqlens = torch.tensor([0, 60, 121], dtype=torch.int32)
    out = extend_attention(
        q, case.layer_view, cu_seqlens, case.block_table, case.context_lens, scale=0.3, window=window
    )
    close(out, expected_attention(q, [0, 60, 121], case, scale=0.3, window=window))


def test_blocks_that_left_the_window_are_never_read(paged, randn) -> None:
    full = paged([37, 90])
    window = 10
    freed = full.without_blocks_before(window)
    assert (freed.block_table[:, 0] == -1).all()
    q = randn(2, 4, 16)
    options: dict[str, Any] = {"scale": 0.3, "window": window}
    for case in (full, freed):
        out = paged_decode(q, case.layer_view, case.block_table, case.context_lens, **options)
        cu_seqlens = torch.tensor([0, 1, 2], dtype=torch.int32)
        extended = extend_attention(q, case.layer_view, cu_seqlens, case.block_table, case.context_lens, **options)
        torch.testing.assert_close(out, extended)
        assert out.isfinite().all()


def test_queries_may_be_a_strided_slice_of_a_fused_projection(paged, expected_attention, randn) -> None:
    case = paged([9, 14])
    fused = randn(2, 4 * 16 + 2 * 2 * 16)
    q = fused[:, :64].view(2, 4, 16)
    out = paged_decode(q, case.layer_view, case.block_table, case.context_lens, scale=0.3)
    close(out, expected_attention(q, [0, 1, 2], case, scale=0.3))


def test_empty_calls(paged, randn) -> None:
    case = paged([4])
    nobody = torch.empty(0, dtype=torch.int32)
    empty = randn(0, 4, 16)
    table = case.block_table[:0]
    assert paged_decode(empty, case.layer_view, table, nobody, scale=1.0).shape == (0, 4, 16)
    start = torch.zeros(1, dtype=torch.int32)
    assert extend_attention(empty, case.layer_view, start, table, nobody, scale=1.0).shape == (0, 4, 16)


def test_arguments_that_do_not_fit_are_named(paged, randn) -> None:
    case = paged([4, 4])
    q = randn(2, 4, 16)
    rest = (case.block_table, case.context_lens)
    with pytest.raises(ValueError, match=r"q heads"):
        paged_decode(q[:, :3], case.layer_view, *rest, scale=1.0)
    with pytest.raises(ValueError, match="width"):
        paged_decode(q[..., :8], case.layer_view, *rest, scale=1.0)
    with pytest.raises(TypeError, match="layer_view"):
        paged_decode(q, case.layer_view.nan_to_num().to(torch.int8), *rest, scale=1.0)
    with pytest.raises(TypeError, match=r"q is .*float64"):
        paged_decode(q.double(), case.layer_view, *rest, scale=1.0)
    with pytest.raises(TypeError, match="int32"):
        paged_decode(q, case.layer_view, case.block_table.long(), case.context_lens, scale=1.0)
    with pytest.raises(ValueError, match="layer_view"):
        paged_decode(q, case.pool, *rest, scale=1.0)
    with pytest.raises(ValueError, match="window"):
        paged_decode(q, case.layer_view, *rest, scale=1.0, window=0)
    with pytest.raises(ValueError, match="unknown kernel backend"):
        paged_decode(q, case.layer_view, *rest, scale=1.0, backend="cuda")
    cu_seqlens = torch.tensor([0, 5, 5], dtype=torch.int32)
    with pytest.raises(ValueError, match="context of 4"):
        extend_attention(randn(5, 4, 16), case.layer_view, cu_seqlens, *rest, scale=1.0)
