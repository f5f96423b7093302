"""Coverage of whole runs of blocks agrees with a look at each cell."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.ids import BlockId, GroupId
from tandem.kvtransfer.coverage import Coverage
from tandem.kvtransfer.frame import Frame, FrameKind, MalformedFrameError
from tests.unit.kvtransfer.conftest import DENSE, Bench, control

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
