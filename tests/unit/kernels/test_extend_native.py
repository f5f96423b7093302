"""extend_attention in C, for bfloat16, against dense attention in float64; on the matrix unit and on vectors."""

from collections.abc import Iterator

import pytest
import torch

from tandem.core.cpu_level import CpuLevel
from tandem.kernels.extend_attention import LIBRARY, extend_attention, flash, is_native
from tests.unit.kernels.levels import needs, paths_of, threads_of

PATHS = paths_of(LIBRARY, CpuLevel.AVX2, CpuLevel.AVX512BF16, CpuLevel.AMX)
pytestmark = needs(CpuLevel.AVX2)
OPTIONS = [
    pytest.param({}, id="plain"),
    pytest.param({"window": 1}, id="window-1"),
    pytest.param({"window": 40}, id="window-40"),
    pytest.param({"softcap": 2.0}, id="softcap"),
    pytest.param({"window": 150, "softcap": 3.0}, id="window-softcap"),
]
LENS, COUNTS = [300, 90, 33, 129, 1], [300, 37, 0, 1, 1]
TOLERANCE = 3e-2
threads = threads_of(1, 3)


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(flash, "takes", lambda *_: False)
    assert LIBRARY.choose_path(request.param)
    yield request.param
    LIBRARY.choose_path("")


def bounds(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)


@pytest.mark.drawn(25)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    ("group", "width", "block_tokens"), [(1, 32, 4), (3, 64, 16), (5, 96, 8), (8, 128, 64), (2, 256, 16)]
)
def test_matches_dense_attention(
    path, threads, paged, expected_attention, randn, group, width, block_tokens, options
) -> None:
    """Prompts, chunks behind others, nothing, single tokens, and rows that belong to no sequence; keys that no query
    sees are not read."""
    case = paged(LENS, dtype=torch.bfloat16, width=width, block_tokens=block_tokens)
    starts = bounds(COUNTS)
    if "window" in options:
        first = case.context_lens - torch.tensor(COUNTS)
        for row, position in zip(case.block_table, first.tolist(), strict=True):
            row[: max(0, position - options["window"] + 1) // block_tokens] = -1
    fused = randn(int(starts[-1]) + 2, 3 * group * width * 2, dtype=torch.bfloat16)
    q = fused[:, : 2 * group * width].view(-1, 2 * group, width)
    assert is_native(q, case.layer_view)
    out = extend_attention(
        q, case.layer_view, starts, case.block_table, case.context_lens, scale=width**-0.5, **options
    )
    assert out.is_contiguous()
    total = int(starts[-1])
    expected = expected_attention(q[:total], starts.tolist(), case, scale=width**-0.5, **options)
    torch.testing.assert_close(out[:total], expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_a_sink_takes_its_share(path, threads, paged, expected_attention, randn) -> None:
    """One far above all scores leaves nothing, one far below changes nothing."""
    case, starts = paged([70], dtype=torch.bfloat16, width=32), bounds([70])
    q = randn(70, 4, 32, dtype=torch.bfloat16)
    sinks = torch.tensor([-100.0, 100.0, -100.0, 0.0])
    out = extend_attention(q, case.layer_view, starts, case.block_table, case.context_lens, scale=0.2, sinks=sinks)
    plain = extend_attention(q, case.layer_view, starts, case.block_table, case.context_lens, scale=0.2)
    assert torch.equal(out[:, [0, 2]], plain[:, [0, 2]])
    assert out[:, 1].abs().max() < 1e-30
    assert (out[:, 3].float().norm(dim=1) < plain[:, 3].float().norm(dim=1)).all()
    fp32 = (q.float(), case.layer_view.float(), starts, case.block_table, case.context_lens)
    expected = extend_attention(*fp32, scale=0.2, sinks=sinks, backend="reference")
    torch.testing.assert_close(out.float(), expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_large_scores_and_large_contexts(path, paged, expected_attention, randn) -> None:
    """Maxima change from span to span, and weights of early keys fade to nothing."""
    case, starts = paged([1000], dtype=torch.bfloat16, width=64, block_tokens=16), bounds([50])
    q = 30 * randn(50, 6, 64, dtype=torch.bfloat16)
    out = extend_attention(q, case.layer_view, starts, case.block_table, case.context_lens, scale=0.125)
    expected = expected_attention(q, starts.tolist(), case, scale=0.125)
    torch.testing.assert_close(out, expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_early_keys_count_as_late_ones(path, paged) -> None:
    """Of equal scores in many spans: ones and minus ones in equal number are nothing, whichever come first."""
    length = 16384
    case, starts = paged([length], dtype=torch.bfloat16, width=32, block_tokens=64), bounds([1])
    early, late = case.block_table[0, : length // 64].long().chunk(2)
    case.layer_view[early, 1], case.layer_view[late, 1] = 1, -1
    q = torch.zeros(1, 2, 32, dtype=torch.bfloat16)
    out = extend_attention(q, case.layer_view, starts, case.block_table, case.context_lens, scale=0.2)
    assert out.abs().max() < 1e-6


def test_what_is_not_a_number_stays_in_its_row(path, paged, randn) -> None:
    case, starts = paged([40], dtype=torch.bfloat16, width=32), bounds([40])
    q = randn(40, 2, 32, dtype=torch.bfloat16)
    plain = extend_attention(q, case.layer_view, starts, case.block_table, case.context_lens, scale=0.2)
    q[7, 1, 3] = torch.nan
    out = extend_attention(q, case.layer_view, starts, case.block_table, case.context_lens, scale=0.2)
    assert out[7, 1].isnan().all()
    out[7, 1] = plain[7, 1]
    assert torch.equal(out, plain)


def test_bad_lengths_and_blocks_are_refused(path, paged, randn) -> None:
    case, q = paged([40], dtype=torch.bfloat16, width=32), randn(41, 2, 32, dtype=torch.bfloat16)
    rest = {"block_table": case.block_table, "context_lens": case.context_lens, "scale": 1.0}
    with pytest.raises(ValueError, match="more queries than tokens"):
        extend_attention(q, case.layer_view, bounds([41]), **rest)
    for rows in ([0, 42], [-2, 5]):
        with pytest.raises(ValueError, match="rows that q does not have: it has 41"):
            extend_attention(q, case.layer_view, torch.tensor(rows, dtype=torch.int32), **rest)
    rest["context_lens"] = torch.tensor([4000], dtype=torch.int32)
    with pytest.raises(IndexError):
        extend_attention(q, case.layer_view, bounds([40]), **rest)
    rest |= {"context_lens": case.context_lens, "block_table": case.block_table + 1000}
    with pytest.raises(IndexError):
        extend_attention(q, case.layer_view, bounds([40]), **rest)


def test_a_window_larger_than_all_positions_hides_nothing(path, paged, randn) -> None:
    case, q = paged([40], dtype=torch.bfloat16, width=32), randn(40, 2, 32, dtype=torch.bfloat16)
    given = (q, case.layer_view, bounds([40]), case.block_table, case.context_lens)
    plain = extend_attention(*given, scale=0.2)
    assert torch.equal(extend_attention(*given, scale=0.2, window=(1 << 32) + 5), plain)


def test_other_types_and_widths_are_left_to_others(path, paged, randn) -> None:
    view = paged([4], dtype=torch.bfloat16, width=32).layer_view
    assert is_native(randn(4, 2, 32, dtype=torch.bfloat16), view)
    assert not is_native(randn(4, 2, 32), view)
    assert not is_native(randn(4, 2, 32, dtype=torch.bfloat16), view.float())
    assert not is_native(randn(4, 2, 48, dtype=torch.bfloat16), view)
    assert not is_native(randn(4, 2, 288, dtype=torch.bfloat16), view)
