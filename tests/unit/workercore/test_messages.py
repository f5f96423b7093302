"""Test the message ring, and messages that wait."""

from collections import deque
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.core.errors import WorkerLostError
from tandem.rpc.v1 import engine_pb2 as e
from tandem.rpc.v1 import generation_pb2 as g
from tandem.rpc.v1 import worker_pb2 as w
from tandem.workercore.inbox import MAX_BYTES, MAX_MESSAGES
from tandem.workercore.message_ring import MessageTooLargeError, RingHandle, RingReader, RingWriter
from tests.unit.simulation.crowd import Crowd


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


@pytest.fixture
def crowd() -> Iterator[Crowd]:
    crowd = Crowd(blocks=16)
    crowd.worker.pulse.grant(crowd.clock.now_s() + 2.5, 9)
    yield crowd
    crowd.close()


def lapse(crowd: Crowd) -> None:
    crowd.clock.advance(3.0)
    crowd.worker.turn()


def submitted(request: str, prompt_tokens: int = 3, router: str = "router") -> e.HostToRank:
    sampling = g.SamplingParams(max_tokens=1, n=1, top_p=1.0, repetition_penalty=1.0)
    submit = w.Submit(
        request=request, attempt=1, leg=w.LEG_FULL, prompt=[1] * prompt_tokens, sampling=sampling, timeout_s=60.0
    )
    return e.HostToRank(router=e.FromRouter(router=router, message=w.RouterMessage(submit=submit)))


def asked_for_a_ticket(request: str) -> e.HostToRank:
    asked = w.PeerMessage(ticket_request=w.TicketRequest(request=request, attempt=1))
    return e.HostToRank(peer=e.FromPeer(worker="p0", incarnation=1, message=asked))


def hear(crowd: Crowd, *messages: e.HostToRank) -> None:
    crowd.worker.mail.messages += messages
    crowd.worker.turn()


def become(crowd: Crowd, incarnation: int, *more: e.HostToRank) -> None:
    """The host has registered anew; `more` is sent to the new incarnation."""
    crowd.worker.pulse.grant(crowd.clock.now_s() + 2.5, incarnation)
    hear(crowd, e.HostToRank(incarnation=e.NewIncarnation(incarnation=incarnation)), *more)
    crowd.worker.turn()


def waiting(crowd: Crowd) -> list[object]:
    return list(crowd.worker.loop._deferred)


def heard_of(crowd: Crowd) -> set[str]:
    """Return the requests that any router got a message about."""
    said = [message.router.message for message in crowd.worker.said if message.HasField("router")]
    return {part.phase.request or part.failed.request for one in said for part in (*one.batch.messages, one)} - {""}


def test_without_a_lease_no_more_is_kept_than_a_bound_however_long_it_takes(crowd: Crowd) -> None:
    lapse(crowd)
    most = 0
    for batch in range(3 * MAX_MESSAGES // 500):
        few = [submitted(f"{batch} {n}") if n % 2 else asked_for_a_ticket(f"{batch} {n}") for n in range(500)]
        hear(crowd, *few)
        most = max(most, len(waiting(crowd)))
    assert most < MAX_MESSAGES
    become(crowd, 10, submitted("new"))
    assert crowd.worker.context.incarnation == 10
    assert heard_of(crowd) == {"new"}, "all that was said to the one before is void, and this is not"
    crowd.worker.check_baseline()


def test_without_a_lease_long_prompts_do_not_fill_the_memory(crowd: Crowd) -> None:
    lapse(crowd)
    for n in range(40):
        hear(crowd, submitted(f"r{n}", prompt_tokens=1 << 20))
        assert sum(item.ByteSize() for item in waiting(crowd) if isinstance(item, e.HostToRank)) < MAX_BYTES
    become(crowd, 10, submitted("new"))
    assert heard_of(crowd) == {"new"}


def test_a_lease_that_comes_back_after_something_was_dropped_is_no_use(crowd: Crowd) -> None:
    """Its routers believe that it has what they sent."""
    lapse(crowd)
    hear(crowd, *(submitted(f"r{n}") for n in range(MAX_MESSAGES)))
    crowd.worker.pulse.grant(crowd.clock.now_s() + 2.5, 9)
    with pytest.raises(WorkerLostError, match="10000 messages that arrived without a lease were dropped"):
        crowd.worker.turn()


def test_a_lease_that_comes_back_in_time_finds_all_that_was_said(crowd: Crowd) -> None:
    lapse(crowd)
    hear(crowd, *(submitted(f"r{n}") for n in range(20)))
    crowd.worker.pulse.grant(crowd.clock.now_s() + 2.5, 9)
    crowd.worker.turn()
    assert heard_of(crowd) == {f"r{n}" for n in range(20)}


def test_that_somebody_is_gone_is_kept_once_until_it_says_something(crowd: Crowd) -> None:
    lapse(crowd)
    router = e.HostToRank(router_gone=e.RouterGone(router="a"))
    peers = [e.HostToRank(peer_gone=e.PeerGone(worker="p0", incarnation=n, reason="a test")) for n in (1, 2)]
    for _ in range(50):
        hear(crowd, router, *peers)
    assert waiting(crowd) == [router, *peers]
    again = [submitted("r", router="a"), router, asked_for_a_ticket("r"), peers[0]]
    hear(crowd, *again)
    assert waiting(crowd) == [router, *peers, *again]


def test_what_comes_in_a_step_is_left_where_it_is_once_too_much_waits(crowd: Crowd) -> None:
    """The host keeps the rest, and ends the streams that send too much; messages taken are handled after the step."""
    loop, mail = crowd.worker.loop, crowd.worker.mail
    mail.messages += [submitted(f"r{n}") for n in range(MAX_MESSAGES)]
    loop._on_layers((), 0, 0)
    assert (len(waiting(crowd)), len(mail.messages)) == (MAX_MESSAGES, 0)
    mail.messages.append(submitted("one more"))
    loop._on_layers((), 0, 1)
    assert (len(waiting(crowd)), len(mail.messages)) == (MAX_MESSAGES, 1)
    assert len(loop._deferred.take()) == MAX_MESSAGES
