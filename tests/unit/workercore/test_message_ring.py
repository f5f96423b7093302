"""The ring keeps every message, in order, across wraps and when full."""

from collections import deque
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.workercore.message_ring import MessageTooLargeError, RingHandle, RingReader, RingWriter


@pytest.fixture
def handle() -> Iterator[RingHandle]:
    handle = RingHandle.create("test", 1024)
    yield handle
    handle.close()


@given(st.lists(st.one_of(st.binary(max_size=500), st.none()), max_size=200))
@settings(max_examples=50, deadline=None)
def test_messages_survive_wraps(operations: list[bytes | None]) -> None:
    handle = RingHandle.create("test", 1024)
    writer, reader = RingWriter(handle), RingReader(handle)
    expected: deque[bytes] = deque()
    for operation in operations:
        if operation is None:
            got = reader.read_all(limit=3)
            assert got == [expected.popleft() for _ in range(min(3, len(expected)))]
        elif writer.try_write(operation):
            expected.append(operation)
    rest: list[bytes] = []
    while batch := reader.read_all():
        rest += batch
    assert rest == list(expected)
    writer.close()
    reader.close()
    handle.close()


def test_full_ring_refuses_and_blocks_with_a_bound(handle: RingHandle) -> None:
    writer, reader = RingWriter(handle), RingReader(handle)
    while writer.try_write(b"x" * 100):
        pass
    with pytest.raises(TimeoutError):
        writer.write(b"x" * 100, timeout_s=0.01)
    assert len(reader.read_all()) == 9
    writer.write(b"y", timeout_s=0.01)
    assert reader.read_all() == [b"y"]


def test_oversized_message_is_refused(handle: RingHandle) -> None:
    with pytest.raises(MessageTooLargeError, match="1024 bytes do not fit a ring of 1024"):
        RingWriter(handle).try_write(b"x" * 1024)
