"""Sinks, a logit a head in the softmax's denominator, in every attention kernel of the CPU, against float64."""

from typing import Any

import pytest
import torch

import tandem.kernels.extend_attention.reference as extend_reference
import tandem.kernels.paged_decode.reference as decode_reference
from tandem.kernels.attention_reference import AttentionSpec
from tandem.kernels.deterministic_attention import paged_attention_deterministic
from tandem.kernels.extend_attention import extend_attention, flash
from tandem.kernels.paged_decode import LIBRARY, is_native, paged_decode

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 3e-2}
LENS = [1, 5, 40, 150, 33]
BACKENDS = ["auto", "reference"]


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.fixture
def sinks() -> torch.Tensor:
    """Far below every score, among them, and far above them all: that one takes nearly everything."""
    return torch.tensor([-200.0, 0.5, 2.0, 20.0])


@pytest.fixture(params=[{}, {"window": 7}, {"window": 9, "softcap": 3.0}], ids=["plain", "window", "softcap"])
def options(request: pytest.FixtureRequest, sinks: torch.Tensor) -> dict[str, Any]:
    return {"scale": 0.25, "sinks": sinks, **request.param}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_decode(paged, expected_attention, randn, options, backend, dtype) -> None:
    case = paged(LENS, dtype=dtype)
    q = randn(len(LENS), 4, 16, dtype=dtype)
    out = paged_decode(q, case.layer_view, case.block_table, case.context_lens, backend=backend, **options)
    close(out, expected_attention(q, list(range(len(LENS) + 1)), case, **options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_extend(paged, expected_attention, randn, options, backend, dtype) -> None:
    """By itself it takes torch's flash kernel where there are no windows: whole prompts, and chunks behind others."""
    lens, counts = [5, 1, 40, 33, 12], [5, 1, 30, 0, 4]
    case = paged(lens, dtype=dtype)
    starts = [0, *torch.tensor(counts).cumsum(0).tolist()]
    q = randn(starts[-1], 4, 16, dtype=dtype)
    cu_seqlens = torch.tensor(starts, dtype=torch.int32)
    arguments = (q, case.layer_view, cu_seqlens, case.block_table, case.context_lens)
    out = extend_attention(*arguments, backend=backend, **options)
    close(out, expected_attention(q, starts, case, **options))


@pytest.mark.parametrize("window", [None, 45])
def test_they_count_once_over_all_spans(paged, expected_attention, randn, monkeypatch, sinks, window) -> None:
    for module in (extend_reference, decode_reference):
        monkeypatch.setattr(module, "_GATHERED_BYTES", 24 * 2 * 2 * 16 * 4)
    monkeypatch.setattr(extend_reference, "_TILE_TOKENS", (8, 8))
    case = paged([130, 61])
    options = {"scale": 0.3, "window": window, "sinks": sinks}
    arguments = (case.block_table, case.context_lens)
    q = randn(60 + 61, 4, 16)
    cu_seqlens = torch.tensor([0, 60, 121], dtype=torch.int32)
    out = extend_attention(q, case.layer_view, cu_seqlens, *arguments, backend="reference", **options)
    close(out, expected_attention(q, [0, 60, 121], case, **options))
    out = paged_decode(q[:2], case.layer_view, *arguments, backend="reference", **options)
    close(out, expected_attention(q[:2], [0, 1, 2], case, **options))


def test_decode_cut_between_threads(paged, expected_attention, randn, sinks) -> None:
    torch.set_num_threads(3)
    case = paged([5, 3001, 0, 7], kv_heads=1, width=64, block_tokens=16)
    q = randn(4, 4, 64)
    out = paged_decode(q, case.layer_view, case.block_table, case.context_lens, scale=0.3, sinks=sinks)
    assert not out[2].any()
    for place in (0, 1, 3):
        expected = expected_attention(q[place, None], [0, 1], case.only(place), scale=0.3, sinks=sinks)
        close(out[place, None], expected)


def test_deterministic(paged, expected_attention, randn, options) -> None:
    """Right, and the same bits in any chunks."""
    case = paged([150, 20], block_tokens=16)
    q = randn(170, 4, 16)
    arguments = (case.block_table, case.context_lens)
    starts = torch.tensor([0, 150, 170], dtype=torch.int32)
    whole = paged_attention_deterministic(q, case.layer_view, starts, *arguments, **options)
    close(whole, expected_attention(q, [0, 150, 170], case, **options))
    for low, high in ((0, 7), (7, 100), (100, 150), (149, 150)):
        part = paged_attention_deterministic(
            q[low:high], case.layer_view, torch.tensor([0, high - low], dtype=torch.int32), case.block_table[:1],
            torch.tensor([high], dtype=torch.int32), **options,
        )  # fmt: skip
        assert torch.equal(part, whole[low:high])


def test_which_code_has_them(paged, randn, sinks) -> None:
    case, spec = paged([40]), AttentionSpec(scale=1.0, sinks=sinks)
    assert flash.takes(randn(40, 4, 16), case.block_table, spec)
    assert is_native(randn(1, 4, 16), case.layer_view, spec) == LIBRARY.is_available()


@pytest.mark.parametrize(
    ("wrong", "error", "complaint"),
    [
        (torch.zeros(3), ValueError, r"sinks must be \[4\]"), (torch.zeros(8)[::2], ValueError, "contiguous"),
        (torch.zeros(4, dtype=torch.bfloat16), TypeError, "sinks must be float32"),
    ],
)  # fmt: skip
def test_others_are_refused(paged, randn, wrong, error, complaint) -> None:
    case = paged([12])
    starts = torch.tensor([0, 1], dtype=torch.int32)
    ways: tuple[tuple[Any, tuple[torch.Tensor, ...]], ...] = (
        (paged_decode, ()), (extend_attention, (starts,)), (paged_attention_deterministic, (starts,)),
    )  # fmt: skip
    for attend, cut in ways:
        with pytest.raises(error, match=complaint):
            attend(randn(1, 4, 16), case.layer_view, *cut, case.block_table, case.context_lens, scale=1.0, sinks=wrong)
