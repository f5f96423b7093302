"""Messages that the receiving end accepts, drops and fails, without sockets."""

import random
import threading
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tandem.core.errors import TransferError
from tandem.core.ids import Attempt, BlockId, GroupId, Incarnation, Rank, TransferId, WorkerId
from tandem.kernels import native
from tandem.kvtransfer.coverage import Coverage
from tandem.kvtransfer.device_payload import DevicePayload
from tandem.kvtransfer.events import Failed, Verified
from tandem.kvtransfer.frame import Checksum, FrameKind, MalformedFrameError, ReplyKind
from tandem.kvtransfer.kv_pool_access import PoolAccess
from tests.unit.kvtransfer.conftest import Bench, control

T = TransferId(1)


def test_verified_only_when_every_cell_is_there_and_bit_exact(bench: Any) -> None:
    bench.intake.expect(bench.ticket())
    frames = bench.everything()
    for frame, payload in frames[:-1]:
        assert bench.send(frame, payload).kind is ReplyKind.ACK
        assert bench.events == []
        with pytest.raises(TransferError, match="not verified"):
            bench.intake.admit(T)
    bench.clock.advance(0.5)
    assert bench.send(*frames[-1]).kind is ReplyKind.ACK
    size = sum(len(payload) for _, payload in frames)
    assert bench.events == [Verified(transfer=T, last_wire_s=0.5, verified_at_s=100.5, bytes=size)]
    expected = Bench()
    for frame, payload in frames:
        expected.pools[frame.group].write_from(frame.blocks, frame.layers, frame.heads, memoryview(payload))
    assert bench.image() == expected.image()
    counts = bench.intake.counters()
    assert (counts["bytes"], counts["frames"], counts["blocks"]) == (size, 5, 3)
    bench.intake.admit(T)
    assert bench.intake.counters()["open"] == 0


def test_the_order_of_frames_does_not_matter() -> None:
    for seed in range(20):
        bench = Bench()
        bench.intake.expect(bench.ticket())
        frames = bench.everything()
        random.Random(seed).shuffle(frames)
        bench.send_all(frames)
        assert [type(e) for e in bench.events] == [Verified]


def test_duplicates_are_harmless_and_not_counted_twice(bench: Any) -> None:
    bench.intake.expect(bench.ticket())
    frames = bench.everything()
    for frame, payload in frames[:-1]:
        bench.send(frame, payload)
        bench.send(frame, payload)
    assert bench.events == []
    bench.send(*frames[-1])
    image = bench.image()
    assert bench.dropped("duplicate") == 4
    assert bench.intake.counters()["bytes"] == sum(len(p) for _, p in frames)
    late, _ = frames[0]
    other = bytes(late.payload_bytes)
    assert bench.send(late, other).kind is ReplyKind.ACK  # after verification nothing is written any more
    bench.intake.admit(T)
    assert bench.send(late, other).kind is ReplyKind.ACK
    assert bench.image() == image
    assert len(bench.events) == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attempt": Attempt(0)}, "stale_attempt"),
        ({"attempt": Attempt(2)}, "stale_attempt"),
        ({"source_incarnation": Incarnation(12)}, "wrong_incarnation"),
        ({"dest_incarnation": Incarnation(23)}, "wrong_incarnation"),
        ({"transfer": TransferId(9)}, "unknown_transfer"),
    ],
)
def test_frames_of_others_are_dropped_counted_and_refused(bench: Any, changes: dict[str, Any], reason: str) -> None:
    bench.intake.expect(bench.ticket())
    before = bench.image()
    for frame, payload in bench.everything():
        reply = bench.send(replace(frame, **changes), payload)
        assert (reply.kind, reply.reason) == (ReplyKind.FAIL, reason)
    assert bench.image() == before
    assert bench.events == []
    assert bench.dropped(reason) == 5
    assert bench.intake.counters()["bytes"] == 0
    bench.send_all()  # the current attempt goes on undisturbed
    assert [type(e) for e in bench.events] == [Verified]


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("is_native", [True, False])
def test_a_flipped_bit_in_any_frame_fails_the_attempt_and_nothing_is_admitted(
    bench: Any, monkeypatch: pytest.MonkeyPatch, number: int, is_native: bool
) -> None:
    monkeypatch.setattr(native, "_is_enabled", is_native)
    bench.intake.expect(bench.ticket())
    before = bench.image()
    frames = bench.everything()
    for good in frames[:number]:
        bench.send(*good)
    frame, payload = frames[number]
    for bit in (0, 17, 8 * len(payload) - 1):
        flipped = bytearray(payload)
        flipped[bit // 8] ^= 1 << bit % 8
        reply = bench.send(frame, bytes(flipped))
        assert reply.kind is ReplyKind.FAIL
        if bit == 0:
            assert reply.reason.startswith("checksum mismatch")
            assert bench.events == [Failed(transfer=T, reason=reply.reason)]
    image = bench.image()
    assert [bench.send(*good).kind for good in frames] == [ReplyKind.FAIL] * 5  # over, even for good frames
    assert bench.image() == image
    assert bench.promised_only(before, image)
    assert (bench.dropped("checksum"), bench.dropped("fenced")) == (1, 7)
    assert bench.intake.counters()["bytes"] == sum(len(sent) for _, sent in frames[:number])
    with pytest.raises(TransferError, match="not verified"):
        bench.intake.admit(T)


class OnDevice(DevicePayload):
    """A payload on a device that pools are on too, or not. `ways`: how it was asked for."""

    is_withdrawn = False

    def __init__(self, content: bytes, *, is_near: bool) -> None:
        self._content, self._is_near = content, is_near
        self.ways: set[str] = set()

    def __len__(self) -> int:
        return len(self._content)

    def suits(self, pool: PoolAccess) -> bool:
        return self._is_near

    def scatter(self, pool: PoolAccess, blocks: Sequence[BlockId], layers: range, heads: range, kind: Checksum) -> int:
        self.ways.add("scattered")
        return pool.write_from(blocks, layers, heads, memoryview(self._content))

    def checksum(self, kind: Checksum) -> int:
        return zlib.crc32(self._content)

    def to_host(self) -> memoryview:
        self.ways.add("fetched")
        return memoryview(self._content)


@pytest.mark.parametrize(("is_near", "way"), [(True, "scattered"), (False, "fetched")])
def test_a_payload_leaves_its_device_only_for_a_pool_elsewhere(bench: Any, is_near: bool, way: str) -> None:
    expected = Bench()
    bench.intake.expect(bench.ticket())
    for frame, content in bench.everything():
        payload = OnDevice(content, is_near=is_near)
        assert bench.intake.accept(frame, payload, bench.link).kind is ReplyKind.ACK
        assert payload.ways == {way}
        expected.pools[frame.group].write_from(frame.blocks, frame.layers, frame.heads, memoryview(content))
    assert [type(e) for e in bench.events] == [Verified]
    assert bench.image() == expected.image()


def test_finish_with_cells_missing_fails(bench: Any) -> None:
    bench.intake.expect(bench.ticket())
    bench.send_all(bench.everything()[:-1])
    reply = bench.send(control(kind=FrameKind.FINISH))
    assert reply.kind is ReplyKind.FAIL
    assert bench.events == [Failed(transfer=T, reason="the sender finished with 2 cells missing")]


def test_finish_after_verification_and_admission_is_done(bench: Any) -> None:
    bench.intake.expect(bench.ticket())
    bench.send_all()
    assert bench.send(control(kind=FrameKind.FINISH)).kind is ReplyKind.DONE
    bench.intake.admit(T)
    assert bench.send(control(kind=FrameKind.FINISH)).kind is ReplyKind.DONE


def test_two_source_ranks_finish_one_after_the_other(bench: Any) -> None:
    bench.intake.expect(bench.ticket(groups={1: (5,)}))
    other = bench.connect()
    first = bench.data(1, (5,), range(1), range(1), source_ranks=2)
    second = bench.data(1, (5,), range(1, 2), range(1), source_ranks=2, source_rank=Rank(1))
    bench.send(*first)
    assert bench.send(control(kind=FrameKind.FINISH, source_ranks=2)).kind is ReplyKind.DONE
    bench.intake.disconnect(bench.link, "gone")  # its part is here
    assert bench.events == []
    bench.send(*second, link=other)
    assert [type(e) for e in bench.events] == [Verified]


@pytest.mark.parametrize(
    "changes",
    [
        {"group": GroupId(2)},
        {"blocks": (1, 3)},
        {"blocks": (1, 2, 2)},
        {"layers": range(1, 4)},
        {"layers": range(2, 2)},
        {"heads": range(1, 5)},
        {"dest_rank": Rank(1)},
        {"payload_bytes": 16},
    ],
)
def test_a_frame_that_contradicts_the_ticket_is_malformed(bench: Any, changes: dict[str, Any]) -> None:
    bench.intake.expect(bench.ticket())
    before = bench.image()
    frame, payload = bench.data(0, (1, 2), range(3), range(4))
    with pytest.raises(MalformedFrameError):
        bench.send(replace(frame, **changes), payload)
    assert bench.image() == before


def test_a_truncated_payload_is_malformed(bench: Any) -> None:
    bench.intake.expect(bench.ticket())
    frame, payload = bench.everything()[0]
    with pytest.raises(MalformedFrameError, match="payload bytes"):
        bench.send(frame, payload[:-1])


def test_the_lost_link_fails_its_open_transfers_alone(bench: Any) -> None:
    other = bench.connect()
    for number in (1, 2, 3):
        bench.intake.expect(bench.ticket(number, {0: (number,)}))
    bench.send(control())
    bench.send(control(transfer=TransferId(2)), link=other)
    bench.send(*bench.data(0, (3,), range(3), range(4), transfer=TransferId(3)))
    assert [type(e) for e in bench.events] == [Verified]
    bench.intake.disconnect(bench.link, "killed")
    bench.intake.disconnect(bench.link, "again")
    assert bench.events[1:] == [Failed(transfer=T, reason="the connection from p0 was lost: killed")]


def test_a_lost_link_fails_what_its_peer_was_promised_but_never_announced(bench: Any) -> None:
    bench.intake.expect(bench.ticket(1, {0: (1,)}))
    bench.intake.expect(replace(bench.ticket(2, {0: (2,)}), sender=WorkerId("p1")))
    bench.intake.expect(replace(bench.ticket(3, {0: (3,)}), sender_incarnation=Incarnation(12)))
    bench.intake.disconnect(bench.link, "killed")
    assert [e.transfer for e in bench.events] == [T]


def test_abort_fails_at_the_receiver(bench: Any) -> None:
    bench.intake.expect(bench.ticket())
    bench.send(control(kind=FrameKind.ABORT))
    assert bench.events == [Failed(transfer=T, reason="the sender gave up")]


def test_after_cancel_nothing_lands(bench: Any) -> None:
    bench.intake.expect(bench.ticket())
    frames = bench.everything()
    bench.send(*frames[0])
    bench.intake.cancel(T)
    bench.intake.cancel(T)
    image = bench.image()
    for frame, payload in frames[1:]:
        reply = bench.send(frame, payload)
        assert (reply.kind, reply.reason) == (ReplyKind.FAIL, "fenced")
    assert bench.image() == image
    assert bench.dropped("fenced") == 4
    assert bench.events == []
    with pytest.raises(TransferError):
        bench.intake.admit(T)


def test_cancel_waits_for_the_write_in_progress(bench: Any) -> None:
    entered, go_on, cancelled = threading.Event(), threading.Event(), threading.Event()
    returned_early: list[bool] = []
    write = bench.pools[0].write_from

    def slow_write(*args: Any) -> int:
        entered.set()
        assert go_on.wait(60)
        returned_early.append(cancelled.wait(0.1))  # a cancel that does not wait for us returns within this window
        return int(write(*args))

    bench.pools[0].write_from = slow_write
    bench.intake.expect(bench.ticket())
    writer = threading.Thread(target=bench.send, args=bench.everything()[0])
    writer.start()
    assert entered.wait(60)

    def cancel() -> None:
        bench.intake.cancel(T)
        cancelled.set()

    canceller = threading.Thread(target=cancel)
    canceller.start()
    go_on.set()
    writer.join()
    canceller.join()
    assert returned_early == [False]
    image = bench.image()
    bench.send(*bench.everything()[1])
    assert bench.image() == image


def test_a_new_incarnation_fails_open_transfers_and_refuses_old_tickets(bench: Any) -> None:
    bench.intake.expect(bench.ticket())
    frames = bench.everything()
    bench.send(*frames[0])
    bench.intake.set_incarnation(Incarnation(33))
    assert bench.events == [Failed(transfer=T, reason="the receiver began a new incarnation")]
    image = bench.image()
    assert bench.send(*frames[1]).reason == "wrong_incarnation"
    assert bench.image() == image
    with pytest.raises(TransferError, match="another incarnation"):
        bench.intake.expect(bench.ticket(2))


def test_a_ticket_with_nothing_to_send_is_verified_at_once(bench: Any) -> None:
    bench.intake.expect(bench.ticket(groups={0: ()}))
    assert [type(e) for e in bench.events] == [Verified]
    assert bench.send(control(kind=FrameKind.FINISH)).kind is ReplyKind.DONE


def test_wire_time_without_a_common_clock_starts_at_arrival(bench: Any) -> None:
    bench.intake.expect(bench.ticket(groups={1: (5,)}))
    frame, payload = bench.data(1, (5,), range(2), range(1), send_ns=5)
    bench.send(frame, payload, link=bench.connect("elsewhere:1"))
    assert bench.events[0].last_wire_s == 0.0


def test_wrong_tickets_are_refused(bench: Any) -> None:
    bench.intake.expect(bench.ticket())
    for ticket in (bench.ticket(), bench.ticket(2, {5: (1,)}), bench.ticket(3, {0: (1, 1)})):
        with pytest.raises(ValueError, match=r"not new|unknown|twice"):
            bench.intake.expect(ticket)
    bench.intake.cancel(T)
    with pytest.raises(ValueError, match="not new"):
        bench.intake.expect(bench.ticket())


def test_a_revoked_promise_drops_late_frames_without_calling_them_a_failure(bench: Any) -> None:
    bench.intake.expect(bench.ticket())
    assert bench.send(control()).kind is ReplyKind.ACK  # announced, but not a byte came
    assert bench.intake.revoke(T)
    before = bench.image()
    frame, payload = bench.everything()[0]
    assert bench.send(frame, payload).kind is ReplyKind.ACK
    assert bench.send(control(kind=FrameKind.FINISH)).kind is ReplyKind.ACK  # and not DONE: nothing is here
    assert bench.image() == before
    assert bench.events == []
    assert bench.dropped("fenced") == 2
    assert bench.intake.transfers() == []
    assert not bench.intake.revoke(T)


def test_a_rank_that_has_bytes_already_revokes_as_quietly_as_the_one_that_had_none(bench: Any) -> None:
    """Its sender learns of it from another rank, and later than it pushes: a refusal would cost the attempt."""
    bench.intake.expect(bench.ticket())
    frames = bench.everything()
    bench.send(*frames[0])
    before = bench.image()
    assert bench.intake.revoke(T, even_if_begun=True)
    assert [bench.send(*late).kind for late in frames[1:]] == [ReplyKind.ACK] * len(frames[1:])
    assert bench.send(control(kind=FrameKind.FINISH)).kind is ReplyKind.ACK
    assert (bench.image(), bench.events, bench.intake.transfers()) == (before, [], [])
    assert not bench.intake.revoke(T, even_if_begun=True)


def test_what_is_being_pushed_cannot_be_revoked(bench: Any) -> None:
    bench.intake.expect(bench.ticket())
    frames = bench.everything()
    bench.send(*frames[0])
    assert not bench.intake.revoke(T)
    (snapshot,) = bench.intake.transfers()
    assert (snapshot.transfer, snapshot.phase, snapshot.bytes) == (T, "pushing", len(frames[0][1]))
    bench.send_all(frames[1:])
    assert not bench.intake.revoke(T)
    assert [type(e) for e in bench.events] == [Verified]


def test_a_link_that_ends_while_an_empty_ticket_is_taken_up_does_not_fail_it(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is nothing to send, so nothing that the connection could have lost."""

    def and_then_the_link_ends(coverage: Coverage) -> bool:
        bench.intake.disconnect(bench.link, "gone")
        return coverage.missing_cells == 0

    monkeypatch.setattr(Coverage, "is_complete", property(and_then_the_link_ends))
    bench.intake.expect(bench.ticket(groups={0: ()}))
    assert [type(e) for e in bench.events] == [Verified]
    bench.intake.admit(T)


def test_frames_of_a_ticket_count_only_from_the_worker_that_it_was_granted_to(bench: Any) -> None:
    bench.intake.expect(bench.ticket())
    before = bench.image()
    other = bench.intake.connect(replace(bench.link.peer, worker=WorkerId("p1")))
    assert bench.send(*bench.everything()[0], link=other).reason == "foreign"
    assert bench.send(control(kind=FrameKind.ABORT), link=other).kind is ReplyKind.FAIL
    assert bench.dropped("foreign") == 2
    assert bench.image() == before
    bench.send_all()
    assert [type(e) for e in bench.events] == [Verified]
