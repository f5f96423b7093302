"""Pools take their memory in the background; what is written there meanwhile stays."""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import threading

import pytest

from tandem.kernels.cpu_memory import back, map_zeroed
from tandem.worker import pool_backing
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
    assert (record.levelno, record.message) == (logging.ERROR, "KV memory is not all there")
