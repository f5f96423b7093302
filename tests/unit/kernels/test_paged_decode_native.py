"""The C code of decode attention against dense attention in float64, on every instruction set that this machine has."""

from collections.abc import Iterator

import pytest
import torch

from tandem.core.cpu_level import CpuLevel
from tandem.kernels.attention_reference import AttentionSpec
from tandem.kernels.paged_decode import LIBRARY, is_native, paged_decode
from tests.unit.kernels.levels import needs, paths_of, threads_of

PATHS = paths_of(LIBRARY, CpuLevel.AVX2, CpuLevel.AVX512)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
LENS = [1, 3, 4, 63, 64, 65, 129, 200, 0, 17]

pytestmark = needs(CpuLevel.AVX2)
threads = threads_of(1, 2)


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    assert LIBRARY.choose_path(request.param)
    yield request.param
    LIBRARY.choose_path("")


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("computed", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_matches_dense_attention(path, threads, paged, expected_attention, randn, computed, stored, group) -> None:
    case = paged(LENS, dtype=stored, kv_heads=3, width=48)
    q = randn(len(LENS), 3 * group, 48, dtype=computed)
    out = paged_decode(q, case.layer_view, case.block_table, case.context_lens, scale=0.2)
    assert out.dtype is computed
    for place, length in enumerate(LENS):
        if not length:
            assert not out[place].any()
            continue
        expected = expected_attention(q[place : place + 1], [0, 1], case.only(place), scale=0.2)
        tolerance = TOLERANCE[computed]
        torch.testing.assert_close(out[place : place + 1], expected, atol=tolerance, rtol=tolerance)


def test_sequences_are_cut_between_threads_and_merged(path, paged, expected_attention, randn) -> None:
    """One long sequence and KV head on three threads: each thread has a part of it, and a short one besides."""
    torch.set_num_threads(3)
    case = paged([5, 3001, 7], kv_heads=1, width=64, block_tokens=16)
    q = 4 * randn(3, 4, 64)
    out = paged_decode(q, case.layer_view, case.block_table, case.context_lens, scale=0.3)
    expected = expected_attention(q, [0, 1, 2, 3], case, scale=0.3)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=2e-6)


def test_large_scores_do_not_overflow_and_what_is_no_number_stays_none(path, paged, expected_attention, randn) -> None:
    case = paged([70, 40], width=16)
    q = 300 * randn(2, 2, 16)
    out = paged_decode(q, case.layer_view, case.block_table, case.context_lens, scale=1.0)
    torch.testing.assert_close(out, expected_attention(q, [0, 1, 2], case, scale=1.0), atol=2e-4, rtol=2e-4)
    q[0, 1, 3] = float("nan")
    out = paged_decode(q, case.layer_view, case.block_table, case.context_lens, scale=1.0)
    assert out[0, 1].isnan().all()
    assert out[1].isfinite().all()


def test_queries_and_tables_may_be_strided(path, paged, expected_attention, randn) -> None:
    case = paged([9, 14])
    fused = randn(2, 4 * 16 + 2 * 2 * 16)
    q = fused[:, :64].view(2, 4, 16)
    table = torch.stack((case.block_table, case.block_table), -1)[..., 0]
    out = paged_decode(q, case.layer_view, table, case.context_lens, scale=0.3)
    torch.testing.assert_close(out, expected_attention(q, [0, 1, 2], case, scale=0.3), atol=2e-6, rtol=2e-6)


def test_blocks_outside_the_pool_are_refused(path, paged, randn) -> None:
    case = paged([9, 14])
    q = randn(2, 4, 16)
    for block in (-1, case.pool.shape[0]):
        table = case.block_table.clone()
        table[1, 2] = block
        with pytest.raises(IndexError, match="block_table"):
            paged_decode(q, case.layer_view, table, case.context_lens, scale=0.3)
    with pytest.raises(IndexError, match="context_lens"):
        paged_decode(q, case.layer_view, case.block_table, case.context_lens + 1000, scale=0.3)


def test_other_cases_are_left_to_torch(paged, randn) -> None:
    view, q, plain = paged([9]).layer_view, randn(1, 4, 16), AttentionSpec(scale=1.0)
    assert is_native(q, view, plain)
    assert not is_native(q, view, AttentionSpec(scale=1.0, window=3))
    assert not is_native(q, view, AttentionSpec(scale=1.0, softcap=3.0))
    assert not is_native(q.half(), view, plain)
    assert not is_native(q, view.half(), plain)
    assert not is_native(randn(1, 4, 24), view, plain)
