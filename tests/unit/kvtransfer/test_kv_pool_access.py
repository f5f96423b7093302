"""HostPool against numpy's own slicing of `[blocks, layers, planes, heads, tokens, width]`."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.ids import BlockId, GroupId
from tandem.core.kv_layout import KVGroupSpec
from tandem.kvtransfer.kv_pool_access import HostPool, payload_bytes

SPEC = KVGroupSpec(group=GroupId(0), layers=(0, 1, 2), planes=2, heads=4, width=3, block_tokens=2, dtype="float16")
NUM_BLOCKS = 6
SHAPE = (NUM_BLOCKS, 3, 2, 4, 2 * 3 * 2)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[list[BlockId], range, range]:
    blocks = draw(st.lists(st.integers(0, NUM_BLOCKS - 1).map(BlockId), min_size=1, unique=True))
    bounds = []
    for size in (3, 4):
        start = draw(st.integers(0, size - 1))
        bounds.append(range(start, draw(st.integers(start + 1, size))))
    return blocks, bounds[0], bounds[1]


@given(cuts())
def test_gather_and_scatter_equal_numpy(cut: tuple[list[BlockId], range, range]) -> None:
    blocks, layers, heads = cut
    data = bytearray(random.Random(1).randbytes(NUM_BLOCKS * SPEC.block_bytes()))
    array = np.frombuffer(bytes(data), np.uint8).reshape(SHAPE)
    expected = array[blocks, layers.start : layers.stop][:, :, :, heads.start : heads.stop]
    out = bytearray(payload_bytes(SPEC, len(blocks), layers, heads))
    HostPool(SPEC, 1, memoryview(data)).read_into(blocks, layers, heads, memoryview(out))
    assert bytes(out) == expected.tobytes()

    target = bytearray(len(data))
    HostPool(SPEC, 1, memoryview(target)).write_from(blocks, layers, heads, memoryview(out))
    image = np.zeros(SHAPE, np.uint8)
    for i, block in enumerate(blocks):
        image[block, layers.start : layers.stop, :, heads.start : heads.stop] = expected[i]
    assert bytes(target) == image.tobytes()


@pytest.mark.parametrize(
    ("blocks", "layers", "heads", "size"),
    [
        ([6], range(3), range(4), None),
        ([-1], range(3), range(4), None),
        ([0], range(2, 4), range(4), None),
        ([0], range(3), range(3, 5), None),
        ([0], range(0), range(4), None),
        ([0], range(3), range(0, 4, 2), None),
        ([0], range(3), range(4), 1),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_written(
    blocks: list[int], layers: range, heads: range, size: int | None
) -> None:
    data = bytearray(NUM_BLOCKS * SPEC.block_bytes())
    payload = bytes([255]) * (payload_bytes(SPEC, len(blocks), layers, heads) if size is None else size)
    with pytest.raises(ValueError, match=r"outside|buffer"):
        HostPool(SPEC, 1, memoryview(data)).write_from([BlockId(b) for b in blocks], layers, heads, memoryview(payload))
    assert not any(data)


def test_a_pool_of_broken_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="whole number"):
        HostPool(SPEC, 1, memoryview(bytearray(SPEC.block_bytes() + 1)))
