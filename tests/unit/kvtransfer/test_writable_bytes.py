"""A bytes object that is filled before any other code sees it."""

from __future__ import annotations

import pytest

from tandem.kvtransfer.transports.writable_bytes import Fillable


@pytest.mark.parametrize("size", [2, 255, 1 << 20])
def test_what_was_written_is_in_the_object(size: int) -> None:
    made = Fillable(size)
    assert len(made.room) == size
    made.room[:] = bytes(range(256)) * (size // 256) + bytes(range(size % 256))
    data = made.take()
    assert type(data) is bytes
    assert data == bytes(range(256)) * (size // 256) + bytes(range(size % 256))
    with pytest.raises(ValueError, match="released"):
        made.room[0] = 1


def test_each_is_an_object_of_its_own() -> None:
    first, second = Fillable(4), Fillable(4)
    first.room[:], second.room[:] = b"aaaa", b"bbbb"
    assert (first.take(), second.take()) == (b"aaaa", b"bbbb")


def test_a_view_outlives_it() -> None:
    made = Fillable(8)
    part = made.room[4:]
    data = made.take()
    del made, data
    part[:] = b"four"
    assert bytes(part) == b"four"


def test_shared_objects_are_never_written() -> None:
    with pytest.raises(ValueError, match="not filled in place"):
        Fillable(1)
