"""Maps heads of a source rank to destination ranks, and cuts a push into frames. Pure arithmetic.

Any P-TP to D-TP split is a slice of heads:

    source tp 2   rank 0: h0 h1 h2 h3          rank 1: h4 h5 h6 h7
    dest   tp 4   r0: h0 h1   r1: h2 h3        r2: h4 h5   r3: h6 h7
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from tandem.core.ids import BlockId, Rank
from tandem.core.kv_layout import KVGroupSpec
from tandem.kvtransfer.frame import MAX_FRAME_BLOCKS
from tandem.kvtransfer.kv_pool_access import TokenRun
from tandem.kvtransfer.wire_codec import PayloadForm


@dataclass(frozen=True, slots=True)
class HeadRoute:
    """Heads that one source rank sends to `dest_rank`, in the source pool's and the destination pool's numbering."""

    dest_rank: Rank
    source: range
    dest: range


class FrameSlice(NamedTuple):
    """The part of a push in one frame: `source`, cut into the receiver's blocks, goes to `dest_blocks`."""

    source: TokenRun
    dest_blocks: tuple[BlockId, ...]
    layers: range
    source_heads: range
    dest_heads: range
    payload_bytes: int


@lru_cache(maxsize=256)
def head_routes(spec: KVGroupSpec, source_tp: int, source_rank: int, dest_tp: int) -> tuple[HeadRoute, ...]:
    """Routes of `source_rank`'s heads. Over all source ranks, every head reaches every destination rank once.

    Where several source ranks hold a head, destination ranks take turns among them.
    """
    mine = spec.heads_of(source_rank, source_tp)
    routes = []
    for dest_rank in range(dest_tp):
        wanted = spec.heads_of(dest_rank, dest_tp)
        sent = [head for head in wanted if _supplier(spec, head, source_tp, dest_rank) == source_rank]
        if sent:
            source = range(sent[0] - mine.start, sent[-1] + 1 - mine.start)
            dest = range(sent[0] - wanted.start, sent[-1] + 1 - wanted.start)
            routes.append(HeadRoute(Rank(dest_rank), source, dest))
    return tuple(routes)


def feeders(specs: Iterable[KVGroupSpec], source_tp: int, dest_tp: int, dest_rank: int) -> frozenset[int]:
    """Source ranks that send anything to `dest_rank`, over all groups."""
    return frozenset[int]().union(*(_feeders_of(spec, source_tp, dest_tp, dest_rank) for spec in specs))


def slices(
    form: PayloadForm,
    source: TokenRun,
    dest_blocks: Sequence[BlockId],
    layers: range,
    route: HeadRoute,
    max_payload_bytes: int,
) -> Iterator[FrameSlice]:
    """Cut a push into frames of at most `max_payload_bytes`: several blocks each, else layers of one, else heads.

    `dest_blocks` hold the tokens of `source`, one after another, in the receiver's `form`. Raises ValueError if one
    head of one layer of one block is larger than a frame.
    """
    row, tokens = form.payload_bytes(1, range(1), range(1)), form.spec.block_tokens
    heads = min(len(route.source), max_payload_bytes // row)
    if heads == 0:
        raise ValueError(f"one head of a block has {row} bytes, a frame {max_payload_bytes}")
    if heads < len(route.source):
        steps = (1, 1, heads)
    else:
        layer_bytes = row * heads
        per_frame = min(len(layers), max_payload_bytes // layer_bytes)
        fits = max_payload_bytes // (layer_bytes * len(layers)) if per_frame == len(layers) else 1
        steps = (min(max(1, fits), MAX_FRAME_BLOCKS), per_frame, heads)
    block_step, layer_step, head_step = steps
    parts = [
        (some, route.source[h : h + head_step], route.dest[h : h + head_step])
        for some in (layers[at : at + layer_step] for at in range(0, len(layers), layer_step))
        for h in range(0, len(route.source), head_step)
    ]
    for b in range(0, len(dest_blocks), block_step):
        dests = tuple(dest_blocks[b : b + block_step])
        part = source.cut(b * tokens, len(dests) * tokens)
        for some, source_heads, dest_heads in parts:
            size = len(dests) * len(some) * len(source_heads) * row
            yield FrameSlice(part, dests, some, source_heads, dest_heads, size)


@lru_cache(maxsize=256)
def _feeders_of(spec: KVGroupSpec, source_tp: int, dest_tp: int, dest_rank: int) -> frozenset[int]:
    return frozenset(_supplier(spec, head, source_tp, dest_rank) for head in spec.heads_of(dest_rank, dest_tp))


def _supplier(spec: KVGroupSpec, head: int, source_tp: int, dest_rank: int) -> int:
    """The source rank that sends `head` to `dest_rank`."""
    if spec.is_replicated:
        return dest_rank % source_tp
    if source_tp <= spec.heads:
        return head // (spec.heads // source_tp)
    copies = source_tp // spec.heads
    return head * copies + dest_rank % copies
