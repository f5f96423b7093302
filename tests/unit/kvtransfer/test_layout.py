"""Test routes of heads, the cutting of pushes, and coverage."""

from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.ids import BlockId, GroupId, Rank
from tandem.core.kv_layout import KVGroupSpec
from tandem.kvtransfer.coverage import Coverage
from tandem.kvtransfer.frame import MAX_FRAME_BLOCKS, Frame, FrameKind, MalformedFrameError
from tandem.kvtransfer.head_routes import HeadRoute, feeders, head_routes, slices
from tandem.kvtransfer.kv_pool_access import TokenRun
from tandem.kvtransfer.wire_codec import PayloadForm
from tests.unit.kvtransfer.conftest import DENSE, Bench, control

SPEC = KVGroupSpec(group=GroupId(0), layers=(0, 1, 2), planes=2, heads=4, width=2, block_tokens=2, dtype="float16")
PAIRS = [*product((1, 2, 4, 8), (1, 2, 4, 8), (4,)), *product((1, 2, 3, 4), (1, 2, 3, 4), (12,))]
"""TPs of both ends, and heads."""


@pytest.mark.parametrize(("source_tp", "dest_tp", "heads"), PAIRS)
@pytest.mark.parametrize("is_replicated", [False, True])
def test_every_head_reaches_every_rank_once(source_tp: int, dest_tp: int, heads: int, is_replicated: bool) -> None:
    spec = replace(SPEC, heads=heads, is_replicated=is_replicated)
    for dest in range(dest_tp):
        wanted = spec.heads_of(dest, dest_tp)
        got: Counter[int] = Counter()
        senders = set()
        for source in range(source_tp):
            mine = spec.heads_of(source, source_tp)
            for route in head_routes(spec, source_tp, source, dest_tp):
                if route.dest_rank == dest:
                    senders.add(source)
                    sent = [mine[h] for h in route.source]
                    assert sent == [wanted[h] for h in route.dest]
                    got.update(sent)
        assert got == Counter(wanted)
        assert senders == feeders([spec], source_tp, dest_tp, dest)


@given(
    blocks=st.integers(1, 40),
    layers=st.integers(1, 3),
    heads=st.integers(1, 4),
    limit=st.integers(16, 2000),
)
def test_slices_cover_a_push_exactly_and_stay_small(blocks: int, layers: int, heads: int, limit: int) -> None:
    sources = [BlockId(b) for b in range(100, 100 + blocks)]
    dests = [BlockId(b) for b in range(500, 500 + blocks)]
    route = HeadRoute(Rank(0), range(4 - heads, 4), range(heads))
    span = range(3 - layers, 3)
    cells: Counter[tuple[int, int, int, int, int]] = Counter()
    row = SPEC.planes * SPEC.head_bytes()
    for part in slices(PayloadForm(SPEC), TokenRun(tuple(sources), 2), dests, span, route, limit):
        assert 0 < part.payload_bytes <= limit
        assert len(part.dest_blocks) <= MAX_FRAME_BLOCKS
        assert part.payload_bytes == len(part.dest_blocks) * len(part.layers) * len(part.dest_heads) * row
        assert part.source.offset_tokens == 0
        pairs = zip(part.source.blocks, part.dest_blocks, strict=True)
        heads_pairs = list(zip(part.source_heads, part.dest_heads, strict=True))
        cells.update((s, d, layer, h, g) for s, d in pairs for layer in part.layers for h, g in heads_pairs)
    assert cells == Counter(
        (s, d, layer, h, g)
        for s, d in zip(sources, dests, strict=True)
        for layer in span
        for h, g in zip(route.source, route.dest, strict=True)
    )


def test_a_head_larger_than_a_frame_is_refused() -> None:
    route = HeadRoute(Rank(0), range(4), range(4))
    with pytest.raises(ValueError, match="one head"):
        list(slices(PayloadForm(SPEC), TokenRun((BlockId(0),), 2), [BlockId(0)], range(1), route, 15))


PROMISED = (6, 2, 3, 0, 7)
LAYERS, HEADS = len(DENSE.layers), DENSE.heads
_PIECES = st.tuples(st.integers(0, len(PROMISED) - 1), st.integers(1, len(PROMISED))).map(
    lambda cut: PROMISED[cut[0] : cut[0] + cut[1]]
)
_ANY_ORDER = st.lists(st.sampled_from(PROMISED), min_size=1, max_size=6).map(tuple)


def _ranges(size: int) -> st.SearchStrategy[range]:
    return st.tuples(st.integers(0, size - 1), st.integers(1, size)).map(
        lambda cut: range(cut[0], min(size, cut[0] + cut[1]))
    )


def _coverage() -> Coverage:
    bench = Bench()
    return Coverage(bench.ticket(groups={0: PROMISED}), bench.pools)


def _frame(blocks: tuple[int, ...], layers: range, heads: range) -> tuple[Frame, int]:
    size = len(blocks) * len(layers) * DENSE.planes * len(heads) * DENSE.head_bytes()
    places: dict[str, Any] = {"blocks": tuple(map(BlockId, blocks)), "layers": layers, "heads": heads}
    return control(kind=FrameKind.DATA, group=GroupId(0), payload_bytes=size, **places), size


@given(st.lists(st.tuples(_PIECES | _ANY_ORDER, _ranges(LAYERS), _ranges(HEADS)), max_size=25))
def test_counts_are_those_of_single_cells(frames: list[tuple[tuple[int, ...], range, range]]) -> None:
    coverage = _coverage()
    missing = {(b, layer, head) for b in PROMISED for layer in range(LAYERS) for head in range(HEADS)}
    for blocks, layers, heads in frames:
        frame, size = _frame(blocks, layers, heads)
        coverage.check(frame, size)
        brought = {(b, layer, head) for b in blocks for layer in layers for head in heads} & missing
        assert coverage.has_new(frame) == bool(brought)
        unfinished = {block for block, _, _ in missing}
        missing -= brought
        assert coverage.mark(frame) == len(unfinished - {block for block, _, _ in missing})
        assert coverage.missing_cells == len(missing)
        assert coverage.is_complete == (not missing)


@pytest.mark.parametrize("blocks", [(2, 3, 1), (1,), (6, 2, 3, 0, 7, 1), (5, 6), (3, 5, 0)])
def test_a_block_beside_the_ticket_s_is_malformed(blocks: tuple[int, ...]) -> None:
    frame, size = _frame(blocks, range(LAYERS), range(HEADS))
    with pytest.raises(MalformedFrameError, match="not in the ticket"):
        _coverage().check(frame, size)
