"""Routes of heads and the cutting of pushes: every cell reaches its place once, for any two TPs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.ids import BlockId, GroupId, Rank
from tandem.core.kv_layout import KVGroupSpec
from tandem.kvtransfer.frame import MAX_FRAME_BLOCKS
from tandem.kvtransfer.layout import HeadRoute, feeders, head_routes, slices
from tandem.kvtransfer.pool import TokenRun
from tandem.kvtransfer.wire_codec import PayloadForm

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
