"""Test pools: memory taken in the background, and the device pool."""

import ctypes
import errno
import logging
import mmap
import threading
import zlib

import pytest
import torch

from tandem.core.ids import BlockId, GroupId
from tandem.core.kv_layout import KVGroupSpec
from tandem.kernels.cpu_memory import back, map_zeroed
from tandem.kvtransfer.kv_pool_access import HostPool, TokenRun
from tandem.worker import pool_backing
from tandem.worker.device_pool_io import DevicePool
from tandem.worker.pool_backing import PIECE_BYTES, PoolBacking


def holes(pool: mmap.mmap) -> int:
    """Pages that take no memory."""
    pages = (ctypes.c_ubyte * (-(-len(pool) // mmap.PAGESIZE)))()
    place = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(pool)))
    assert ctypes.CDLL(None).mincore(place, ctypes.c_size_t(len(pool)), pages) == 0
    return sum(not page & 1 for page in pages)


@pytest.fixture
def pool() -> mmap.mmap:
    held = map_zeroed(3 * PIECE_BYTES + 5)
    if not back(ctypes.addressof(ctypes.c_char.from_buffer(held)), 1):
        pytest.skip("this system backs nothing when asked")
    return held


def test_all_of_a_pool_is_backed_and_keeps_what_was_written(pool: mmap.mmap) -> None:
    pool[PIECE_BYTES : PIECE_BYTES + 6] = b"tandem"
    assert holes(pool) > 0
    PoolBacking([memoryview(pool)], dict).start().join()
    assert holes(pool) == 0
    assert pool[PIECE_BYTES : PIECE_BYTES + 6] == b"tandem"


def test_steps_have_the_core_for_themselves(pool: mmap.mmap, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_backing, "BUSY_PAUSE_S", 60.0)
    asked = threading.Event()

    def computing() -> dict[str, int]:
        asked.set()
        return {"tokens": 3}

    thread = PoolBacking([memoryview(pool)], computing).start()
    assert asked.wait(10)
    assert thread.is_alive()
    assert holes(pool) > 0


def test_memory_that_is_gone_is_an_error_in_the_log(
    pool: mmap.mmap, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_address: int, _size: int) -> bool:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(pool_backing, "back", refuse)
    PoolBacking([memoryview(pool)], dict).run()
    (record,) = caplog.records
    assert (record.levelno, record.message) == (logging.ERROR, "KV memory is incomplete")


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
