"""torch's flash kernel behind extend_attention, against dense attention in float64."""

import pytest
import torch

from tandem.kernels.attention_reference import AttentionSpec
from tandem.kernels.extend_attention import extend_attention, flash

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 3e-2}


@pytest.fixture(autouse=True)
def without_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.kernels.extend_attention.is_native", lambda *_: False)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("computed", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [1, 3, 4])
def test_matches_dense_attention(paged, expected_attention, randn, computed, stored, group) -> None:
    """A whole prompt, a chunk behind others, nothing, a single token, and rows that belong to no sequence."""
    lens, counts = [40, 90, 33, 21], [40, 37, 0, 1]
    case = paged(lens, dtype=stored, width=32)
    starts = [0, *torch.tensor(counts).cumsum(0).tolist()]
    fused = randn(starts[-1] + 2, 3 * group * 32 * 2, dtype=computed)
    q = fused[:, : 2 * group * 32].view(-1, 2 * group, 32)
    assert flash.takes(q, case.block_table, AttentionSpec(scale=0.25))
    cu_seqlens = torch.tensor(starts, dtype=torch.int32)
    out = extend_attention(q, case.layer_view, cu_seqlens, case.block_table, case.context_lens, scale=0.25)
    assert out.dtype is computed
    assert out.is_contiguous()
    expected = expected_attention(q[: starts[-1]], starts, case, scale=0.25)
    tolerance = TOLERANCE[computed]
    torch.testing.assert_close(out[: starts[-1]], expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("has_sinks", [False, True])
def test_heads_in_parts_answer_with_the_same_bits(paged, randn, monkeypatch, has_sinks) -> None:
    lens, counts = [40, 90], [40, 37]
    case = paged(lens, dtype=torch.bfloat16, width=32)
    q = randn(sum(counts), 10, 32, dtype=torch.bfloat16)
    arguments = (q, case.layer_view, torch.tensor([0, 40, 77], dtype=torch.int32), case.block_table, case.context_lens)
    spec = AttentionSpec(scale=0.25, sinks=randn(10) if has_sinks else None)
    whole = flash.extend_attention_flash(*arguments, spec)
    for heads in (1, 2, 3):
        monkeypatch.setattr(flash, "REORDERED_BYTES", heads * 2 * 2 * 90 * 32 * 2)
        parts = list(flash._parts(5, torch.empty(2, 1, 90, 32, dtype=torch.bfloat16)))
        assert [part.stop - part.start for part in parts] == [heads] * (5 // heads) + [5 % heads] * (5 % heads > 0)
        assert torch.equal(flash.extend_attention_flash(*arguments, spec), whole)


def test_short_chunks_windows_and_soft_caps_are_left_to_the_reference(paged, randn) -> None:
    table, plain = paged([40, 90]).block_table, AttentionSpec(scale=1.0)
    assert flash.takes(randn(8, 4, 16), table, plain)
    assert not flash.takes(randn(7, 4, 16), table, plain)
    assert not flash.takes(randn(8, 4, 16), table, AttentionSpec(scale=1.0, window=9))
    assert not flash.takes(randn(8, 4, 16), table, AttentionSpec(scale=1.0, softcap=9.0))
    assert not flash.takes(randn(8, 4, 16).half(), table, plain)


def test_more_queries_than_context_are_refused(paged, randn) -> None:
    case = paged([40])
    cu_seqlens = torch.tensor([0, 41], dtype=torch.int32)
    with pytest.raises(ValueError, match="context of 40"):
        extend_attention(randn(41, 4, 16), case.layer_view, cu_seqlens, case.block_table, case.context_lens, scale=1.0)
