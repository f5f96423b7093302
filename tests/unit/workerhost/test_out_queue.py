"""What waits for a stream: urgent messages at once, patient ones with them, in order, in as few messages as fit."""

from __future__ import annotations

import asyncio

import pytest

from tandem.rpc.v1 import worker_pb2 as w
from tandem.workerhost import out_queue, streams
from tandem.workerhost.out_queue import OutQueue
from tandem.workerhost.streams import joined


def phase(request: str) -> w.WorkerMessage:
    return w.WorkerMessage(phase=w.RequestPhase(request=request, attempt=1, phase="queued"))


def tokens(request: str) -> w.WorkerMessage:
    return w.WorkerMessage(tokens=w.StepTokens(chunks=[w.TokenChunk(request=request, attempt=1, tokens=[7])]))


def test_what_may_wait_goes_with_what_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(out_queue, "PATIENCE_S", 3600.0)

    async def run() -> None:
        queue: OutQueue[str] = OutQueue()
        taking = asyncio.ensure_future(queue.take())
        assert queue.put("patient", may_wait=True)
        for _ in range(5):
            await asyncio.sleep(0)
        assert not taking.done()
        assert queue.put("urgent")
        assert queue.put("also patient", may_wait=True)
        assert await taking == ["patient", "urgent", "also patient"]

    asyncio.run(run())


def test_what_may_wait_does_not_wait_for_ever() -> None:
    async def run() -> None:
        queue: OutQueue[str] = OutQueue()
        for text in ("one", "two"):
            queue.put(text, may_wait=True)
            async with asyncio.timeout(10):
                assert await queue.take() == [text]

    asyncio.run(run())


def test_a_closed_queue_gives_what_it_has_and_then_nothing() -> None:
    async def run() -> None:
        queue: OutQueue[str] = OutQueue()
        queue.put("last", may_wait=True)
        queue.close()
        assert not queue.put("too late")
        assert await queue.take() == ["last"]
        assert await queue.take() == []
        assert await queue.take() == []

    asyncio.run(run())


def test_a_full_queue_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(out_queue, "MAX_QUEUED", 2)

    async def run() -> None:
        queue: OutQueue[int] = OutQueue()
        assert [queue.put(number) for number in range(4)] == [True, True, False, False]
        assert await queue.take() == [0, 1]
        assert await queue.take() == []

    asyncio.run(run())


def test_one_message_is_sent_as_it_is() -> None:
    assert list(joined([tokens("a")])) == [tokens("a")]
    assert list(joined([])) == []


def test_several_messages_become_one_in_order() -> None:
    said = [phase("a"), tokens("a"), phase("b")]
    (batch,) = joined(said)
    assert list(batch.batch.messages) == said


def test_a_batch_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    said = [tokens("x" * 100) for _ in range(5)]
    monkeypatch.setattr(streams, "BATCH_BYTES", said[0].ByteSize())
    sent = list(joined(said))
    assert [len(message.batch.messages) for message in sent] == [2, 2, 0]
    assert [one for message in sent for one in (message.batch.messages or [message])] == said
