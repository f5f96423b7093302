"""Messages that wait for a stream: urgent ones at once, patient ones with them, in order, in as few messages as fit."""

from __future__ import annotations

import asyncio

import pytest

from tandem.rpc.v1 import worker_pb2 as w
from tandem.workerhost import relay, send_queue
from tandem.workerhost.relay import joined
from tandem.workerhost.send_queue import OutQueue


def phase(request: str) -> bytes:
    return w.WorkerMessage(phase=w.RequestPhase(request=request, attempt=1, phase="queued")).SerializeToString()


def tokens(request: str) -> bytes:
    chunk = w.TokenChunk(request=request, attempt=1, tokens=[7])
    return w.WorkerMessage(tokens=w.StepTokens(chunks=[chunk])).SerializeToString()


def parts(message: bytes) -> list[bytes]:
    """Return the parts of a batch, as its reader finds them."""
    said = w.WorkerMessage.FromString(message).batch.messages
    return [one.SerializeToString() for one in said]


def test_what_may_wait_goes_with_what_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send_queue, "PATIENCE_S", 3600.0)

    async def run() -> None:
        queue = OutQueue()
        taking = asyncio.ensure_future(queue.take())
        assert queue.put(b"patient", may_wait=True)
        for _ in range(5):
            await asyncio.sleep(0)
        assert not taking.done()
        assert queue.put(b"urgent")
        assert queue.put(b"also patient", may_wait=True)
        assert await taking == [b"patient", b"urgent", b"also patient"]

    asyncio.run(run())


def test_what_may_wait_does_not_wait_for_ever() -> None:
    async def run() -> None:
        queue = OutQueue()
        for text in (b"one", b"two"):
            queue.put(text, may_wait=True)
            async with asyncio.timeout(10):
                assert await queue.take() == [text]

    asyncio.run(run())


def test_a_closed_queue_gives_what_it_has_and_then_nothing() -> None:
    async def run() -> None:
        queue = OutQueue()
        queue.put(b"last", may_wait=True)
        queue.close()
        assert not queue.put(b"too late")
        assert await queue.take() == [b"last"]
        assert await queue.take() == []
        assert await queue.take() == []

    asyncio.run(run())


def test_a_full_queue_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send_queue, "MAX_QUEUED", 2)

    async def run() -> None:
        queue = OutQueue()
        assert [queue.put(bytes(number)) for number in range(4)] == [True, True, False, False]
        assert await queue.take() == [b"", b"\0"]
        assert await queue.take() == []

    asyncio.run(run())


def test_a_queue_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages have up to 4 MiB: their number alone is no bound."""
    monkeypatch.setattr(send_queue, "MAX_QUEUED_BYTES", 10)

    async def run() -> None:
        queue = OutQueue()
        for _ in range(3):  # what was taken does not count
            assert queue.put(bytes(6))
            assert queue.put(bytes(6))
            assert await queue.take() == [bytes(6), bytes(6)]
        assert [queue.put(bytes(6)) for _ in range(4)] == [True, True, False, False]
        assert await queue.take() == [bytes(6), bytes(6)]
        assert await queue.take() == []

    asyncio.run(run())


def test_one_message_is_sent_as_it_is() -> None:
    assert list(joined([tokens("a")])) == [tokens("a")]
    assert list(joined([])) == []


def test_several_messages_become_one_in_order() -> None:
    said = [phase("a"), tokens("a"), phase("b")]
    (batch,) = joined(said)
    assert parts(batch) == said


def test_a_batch_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    said = [tokens("x" * 100) for _ in range(5)]
    monkeypatch.setattr(relay, "BATCH_BYTES", len(said[0]))
    sent = list(joined(said))
    assert [len(parts(message)) for message in sent] == [2, 2, 0]
    assert [one for message in sent for one in (parts(message) or [message])] == said
