"""Test several messages in one, packed prompts and packed alternatives."""

import math
import sys
from array import array
from collections import deque

import pytest

from tandem.core.ids import RequestId
from tandem.core.sampling import SamplingParams
from tandem.core.state_enums import Phase
from tandem.router.dispatch.inflight_request import ArrivalQueue, GenerationRequest
from tandem.router.workers import proto_convert
from tandem.router.workers.proto_convert import Alternatives
from tandem.rpc.v1 import worker_pb2 as w
from tests.unit.router.stage import Stage


def pings(count: int) -> deque[w.RouterMessage]:
    return deque(proto_convert.ping(sequence) for sequence in range(1, 1 + count))


def test_one_message_is_sent_as_it_is() -> None:
    unsent = pings(1)
    assert proto_convert.next_of(unsent) == proto_convert.ping(1)
    assert not unsent


def test_what_waits_goes_in_one_message_in_order() -> None:
    unsent = pings(3)
    assert list(proto_convert.next_of(unsent).batch.messages) == list(pings(3))
    assert not unsent


def test_what_does_not_fit_waits_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proto_convert, "BATCH_BYTES", 2 * proto_convert.ping(1).ByteSize())
    unsent = pings(5)
    sent = []
    while unsent:
        sent.append(proto_convert.next_of(unsent))
    assert [len(message.batch.messages) for message in sent] == [2, 2, 0]
    assert [one for message in sent for one in (message.batch.messages or [message])] == list(pings(5))


def test_a_message_that_is_too_large_for_a_batch_goes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proto_convert, "BATCH_BYTES", 1)
    unsent = pings(2)
    assert [proto_convert.next_of(unsent), proto_convert.next_of(unsent)] == list(pings(2))


async def test_legs_carry_the_prompt_packed_and_batches_are_heard_in_order() -> None:
    stage, inbox = Stage("p", "d"), ArrivalQueue(1 << 20)
    work = GenerationRequest(prompt=[3, 1, 4, 1, 5], sampling=SamplingParams(max_tokens=4), timeout_s=60.0)
    with stage.dispatcher.submit(RequestId("r"), 0, work, inbox) as flight:
        for worker, leg in (("p", w.LEG_PREFILL), ("d", w.LEG_DECODE)):
            (submit,) = stage.submitted(worker)
            assert submit.leg == leg
            assert list(array("I", submit.prompt_ids)) == [3, 1, 4, 1, 5]
            assert not submit.prompt
        link = stage.link("p")
        chunk = w.TokenChunk(request="r", attempt=1, tokens=[7])
        said = [
            w.WorkerMessage(phase=w.RequestPhase(request="r", attempt=1, phase="queued")),
            w.WorkerMessage(phase=w.RequestPhase(request="r", attempt=1, phase="transfer")),
            w.WorkerMessage(tokens=w.StepTokens(chunks=[chunk])),
        ]
        for one in proto_convert.each(w.WorkerMessage(batch=w.WorkerBatch(messages=said))):
            link._hear(one)
        assert flight.phase is Phase.TRANSFER
        assert [list(arrival.tokens) for arrival in await inbox.take()] == [[7]]


TOP = ((7, -0.5), (4_294_967_295, -1.25), (0, -math.inf))


def test_they_read_as_the_tuples_they_were_made_of() -> None:
    packed = Alternatives(TOP)
    assert tuple(packed) == TOP
    assert packed == TOP
    assert packed != TOP[:2]
    assert (len(packed), packed[1], packed[-1]) == (3, TOP[1], TOP[2])
    assert (packed[:2], packed[:None], packed[5:]) == (TOP[:2], TOP, ())
    assert hash(packed) == hash(TOP)
    assert repr(packed) == repr(TOP)
    with pytest.raises(IndexError):
        packed[3]


def test_they_take_eight_bytes_each() -> None:
    assert sys.getsizeof(Alternatives(TOP * 100)._packed) - sys.getsizeof(Alternatives(())._packed) == 300 * 8
