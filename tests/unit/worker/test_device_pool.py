"""The device pool gives and takes the same bytes as the host pool over the same memory."""

import zlib

import pytest
import torch

from tandem.core.ids import BlockId, GroupId
from tandem.core.kv_layout import KVGroupSpec
from tandem.kvtransfer.pool import HostPool, TokenRun
from tandem.worker.device_pool import DevicePool

SPEC = KVGroupSpec(group=GroupId(0), layers=(0, 1, 2), planes=2, heads=4, width=8, block_tokens=4, dtype="bfloat16")
BLOCKS = [BlockId(b) for b in (5, 0, 3)]


def pools() -> tuple[DevicePool, HostPool]:
    tensor = torch.randn(7, 3, 2, 4, 4, 8).to(torch.bfloat16)
    data = memoryview(tensor.view(torch.uint8).numpy().reshape(-1))  # type: ignore[arg-type]
    return DevicePool(SPEC, 1, tensor), HostPool(SPEC, 1, data)


@pytest.mark.parametrize("layers", [range(3), range(1, 2)])
@pytest.mark.parametrize("heads", [range(4), range(1, 3)])
def test_same_bytes_as_the_host_pool(layers: range, heads: range) -> None:
    device, host = pools()
    size = len(BLOCKS) * len(layers) * 2 * len(heads) * SPEC.head_bytes()
    ours, theirs = bytearray(size), bytearray(size)
    crc = device.read_into(BLOCKS, layers, heads, memoryview(ours))
    assert host.read_into(BLOCKS, layers, heads, memoryview(theirs)) == crc == zlib.crc32(ours)
    assert ours == theirs
    fresh = bytes(range(256)) * (size // 256)
    assert device.write_from(BLOCKS, layers, heads, memoryview(fresh)) == zlib.crc32(fresh)
    host.read_into(BLOCKS, layers, heads, memoryview(theirs))
    assert bytes(theirs) == fresh


@pytest.mark.parametrize("tokens", [1, 3, 4, 8, 16])
@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("heads", [range(4), range(1, 3)])
def test_tokens_are_cut_anew_as_by_the_host_pool(tokens: int, offset: int, heads: range) -> None:
    device, host = pools()
    for blocks, targets in (((5, 0, 3), -(-(12 - offset) // tokens)), ((5, 0, 3), 1), ((), 0)):
        run = TokenRun(tuple(map(BlockId, blocks)), 4, offset)
        size = targets * 2 * 2 * len(heads) * tokens * 8 * 2
        ours, theirs = bytearray(size), bytearray(size)
        crc = device.read_tokens_into(run, range(1, 3), heads, memoryview(ours), target_tokens=tokens)
        assert host.read_tokens_into(run, range(1, 3), heads, memoryview(theirs), target_tokens=tokens) == crc
        assert ours == theirs


def test_what_does_not_fit_is_refused() -> None:
    device, _ = pools()
    block = memoryview(bytearray(SPEC.block_bytes()))
    with pytest.raises(ValueError, match="outside the pool's 7"):
        device.write_from([BlockId(7)], range(3), range(4), block)
    with pytest.raises(ValueError, match="layers"):
        device.read_into([BlockId(0)], range(4), range(4), block)
    with pytest.raises(ValueError, match="a buffer of"):
        device.read_into([BlockId(0), BlockId(1)], range(3), range(4), block)
    for run, tokens in ((TokenRun((BlockId(0),), 8), 4), (TokenRun((BlockId(0),), 4, 4), 4), (TokenRun((), 4), 0)):
        with pytest.raises(ValueError, match="tokens"):
            device.read_tokens_into(run, range(3), range(4), block, target_tokens=tokens)
    with pytest.raises(ValueError, match="a buffer of"):
        device.read_tokens_into(TokenRun((BlockId(0),), 4), range(3), range(4), block[1:], target_tokens=2)
