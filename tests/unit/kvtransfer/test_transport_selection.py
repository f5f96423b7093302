"""A link's choice of transport, over links that are made of numbers: a clock moves as their bytes do."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections.abc import Callable, Iterator
from types import MappingProxyType

import pytest

from tandem.core.clock import ManualClock
from tandem.core.ids import Incarnation, Rank, WorkerId
from tandem.core.link_speed import LinkSpeed
from tandem.core.secret import ClusterSecret
from tandem.kvtransfer import transport_selection as survey_module
from tandem.kvtransfer.frame import Frame, FrameKind, FrameReply, ReplyKind
from tandem.kvtransfer.link_meter import ENOUGH_BYTES, LinkMeter
from tandem.kvtransfer.link_speeds import LinkSpeeds
from tandem.kvtransfer.probed_connection import MOST_BYTES, ProbedConnection
from tandem.kvtransfer.remeasure import FIRST_PAUSE_S, PATIENCE_S, Remeasure
from tandem.kvtransfer.ticket import Endpoint
from tandem.kvtransfer.transport_selection import Chosen, TransportSelector
from tandem.kvtransfer.transports import dialer
from tandem.kvtransfer.transports.base import Link, LinkClosedError, Peer
from tandem.kvtransfer.transports.dialer import candidates
from tandem.kvtransfer.transports.registry import Transport

SECRET = ClusterSecret(b"the secret of these tests")
ME = Peer(worker=WorkerId("p0"), incarnation=Incarnation(11), rank=Rank(0), host="a")


class NumberLink:
    """Takes `size / bytes_per_s` seconds of the clock for every frame, and answers at once."""

    stalls = 0
    max_payload_bytes = 1 << 20

    def __init__(self, world: World, name: str, peer: Peer) -> None:
        self.transport, self.peer, self._world = name, peer, world
        self.sent = 0
        self.is_closed = self.is_released = False
        self._answers: queue.SimpleQueue[FrameReply | None] = queue.SimpleQueue()
        self._closed = threading.Event()

    def reserve(self, size: int) -> memoryview:
        if not self._world.has_room:
            assert self._closed.wait(timeout=30), "nobody closed a link that nothing moves on"
            raise LinkClosedError("closed")
        return memoryview(bytearray(size))

    def commit(self, frame: Frame, payload: memoryview | None) -> None:
        assert frame.kind is FrameKind.PROBE
        self.sent += frame.payload_bytes
        self._world.on_probe()
        self._world.clock.advance(1e-5 + frame.payload_bytes / self._world.speeds[self.transport])
        self._answers.put(FrameReply(kind=self._world.answer))

    def replies(self) -> Iterator[FrameReply]:
        while (reply := self._answers.get(timeout=30)) is not None:
            yield reply
        raise LinkClosedError("closed")

    def close(self) -> None:
        self.is_closed = True
        self._closed.set()
        self._answers.put(None)

    def release(self) -> None:
        self.is_released = True


class World:
    """Transports by speed in bytes a second; one that has none refuses."""

    def __init__(self, **speeds: float) -> None:
        self.clock = ManualClock(100.0)
        self.speeds = speeds
        self.names = list(speeds)
        self.answer = ReplyKind.ACK
        self.on_probe: Callable[[], None] = lambda: None
        self.is_wanted = self.has_room = True
        self.links: list[NumberLink] = []
        self.table = LinkSpeeds(self.clock)
        self.moves: list[str] = []
        self.lines: list[ProbedConnection] = []

    def transports(self) -> dict[str, Transport]:
        def dialler(name: str) -> Callable[[Endpoint, Peer, ClusterSecret], Link]:
            def dial(endpoint: Endpoint, peer: Peer, secret: ClusterSecret) -> Link:
                if not self.speeds[name]:
                    raise LinkClosedError("connection refused")
                self.links.append(NumberLink(self, name, peer))
                return self.links[-1]

            return dial

        def listen(site: object) -> object:
            raise AssertionError("nobody listens here")

        return {n: Transport(name=n, dial=dialler(n), listen=listen) for n in self.names}  # type: ignore[arg-type]

    def survey(self, worker: str = "d0", preference: str = "auto") -> TransportSelector:
        endpoints = [Endpoint(rank=Rank(0), transport=name, host="b", address=f"{worker}:1") for name in self.names]
        options = candidates(endpoints, "a", preference)
        return TransportSelector(
            self.table, WorkerId(worker), Rank(0), options, ME, SECRET, self.clock, lambda: self.is_wanted
        )

    def choose(self, survey: TransportSelector) -> Chosen:
        def open_line(candidate: dialer.DialCandidate) -> ProbedConnection:
            link = dialer.dial(candidate.endpoint, ME, SECRET)
            line = ProbedConnection(link, on_reply=lambda _: None, on_end=lambda *_: None, clock=self.clock)
            line.start()
            self.lines.append(line)
            return line

        return survey.choose(open_line)

    def care(self, survey: TransportSelector, chosen: Chosen, meter: LinkMeter) -> Remeasure:
        return Remeasure(survey, chosen, self.table, meter, self.clock, self.moves.append)

    def dialled(self) -> list[str]:
        names = [link.transport for link in self.links]
        self.links = [link for link in self.links if not link.is_closed]
        return names

    def slow_down(self, meter: LinkMeter) -> None:
        """Transfers that take a hundred times as long as a link of 1 GB/s needs."""
        meter.begin()
        self.clock.advance(ENOUGH_BYTES / 1e7)
        meter.wrote(ENOUGH_BYTES)

    def close(self) -> None:
        for line in self.lines:
            line.end()
        assert all(link.is_released for link in self.links)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def build(**speeds: float) -> World:
        worlds.append(World(**speeds))
        monkeypatch.setattr(dialer, "TRANSPORTS", MappingProxyType(worlds[-1].transports()))
        return worlds[-1]

    yield build
    for world in worlds:
        world.close()


Make = Callable[..., World]


def test_every_transport_is_measured_and_the_fastest_is_kept(make: Make) -> None:
    world = make(one=1e9, two=4e9, three=2e9)
    chosen = world.choose(world.survey())
    assert chosen.candidate.endpoint.transport == "two"
    assert chosen.reason.startswith("another host; fastest of one, two, three; one measured 991 MB/s, less than")
    assert world.dialled() == ["one", "two", "three", "two"]
    assert [link.transport for link in world.links] == ["two"]  # the others were closed
    for name, speed in (("one", 1e9), ("two", 4e9), ("three", 2e9)):
        known = world.table.fresh(("a", "b", name))
        assert known is not None
        assert known.bytes_per_s == pytest.approx(speed, rel=0.1)
        assert known.latency_s == pytest.approx(1e-5, rel=0.1)


def test_measuring_connections_are_anonymous_and_brief(make: Make) -> None:
    """A receiver fails the promises to a peer when its connection ends: these end at once."""
    world = make(one=1e12, two=1e6)
    began_s = world.clock.now_s()
    world.choose(world.survey())
    fast, slow, kept = world.links
    assert (fast.peer.incarnation, slow.peer.incarnation, kept.peer.incarnation) == (0, 0, 11)
    assert MOST_BYTES // 2 < fast.sent < MOST_BYTES + 1000
    assert slow.sent < 1 << 18  # 64 KiB took longer than the bound: one more round, to be sure
    assert world.clock.now_s() - began_s < 0.25


@pytest.mark.parametrize("number", range(1, 12))
def test_a_moment_in_which_the_process_stands_still_is_not_the_link_s_speed(make: Make, number: int) -> None:
    world = make(one=1e9)
    probes = itertools.count(1)
    world.on_probe = lambda: world.clock.advance(0.1 if next(probes) == number else 0.0)
    world.choose(world.survey())
    known = world.table.fresh(("a", "b", "one"))
    assert known is not None
    assert known.bytes_per_s == pytest.approx(1e9, rel=0.1)
    assert known.latency_s == pytest.approx(1e-5, rel=0.1)


def test_a_process_that_stands_still_between_all_steps_measures_all_the_same(make: Make) -> None:
    class Halting(ManualClock):
        def now_s(self) -> float:
            self.advance(0.1)
            return super().now_s()

    world = make(one=1e9)
    line = ProbedConnection(
        NumberLink(world, "one", ME), on_reply=lambda _: None, on_end=lambda *_: None, clock=Halting(0.0)
    )  # fmt: skip
    line.start()
    world.lines.append(line)
    assert line.measure(Rank(0)).bytes_per_s > 0


def test_what_is_known_and_fresh_is_not_measured_again(make: Make) -> None:
    world = make(one=1e9, two=4e9)
    world.choose(world.survey("d0"))
    world.dialled()
    world.choose(world.survey("d1"))  # another worker on the same host
    assert [link.transport for link in world.links] == ["two", "two"]
    world.clock.advance(700.0)
    world.dialled()
    world.choose(world.survey("d0"))
    assert world.dialled()[2:] == ["one", "two", "two"]


def test_a_faster_transport_that_fails_is_passed_by_with_a_warning(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    world = make(one=0.0, two=1e9)
    with caplog.at_level(logging.INFO):
        selector = world.survey()
        chosen = world.choose(selector)
    assert chosen.candidate.endpoint.transport == "two"
    assert selector.unused(chosen.candidate) == ("one failed: connection refused",)
    (warning,) = [r for r in caplog.records if r.message == "transfer_faster_link_unused"]
    assert warning.levelno == logging.WARNING


def test_what_failed_a_moment_ago_is_left_alone_unless_nothing_else_works(make: Make) -> None:
    world = make(one=0.0, two=1e9)
    world.choose(world.survey())
    world.dialled()
    world.speeds["one"] = 1e9
    world.choose(world.survey())
    assert "one" not in world.dialled()
    world.speeds["two"] = 0.0
    chosen = world.choose(world.survey())
    assert chosen.candidate.endpoint.transport == "one"


def test_nothing_that_works_is_a_failure_with_every_reason(make: Make) -> None:
    world = make(one=0.0, two=0.0)
    with pytest.raises(LinkClosedError, match="one failed: connection refused; two failed: connection refused"):
        world.choose(world.survey())
    with pytest.raises(LinkClosedError, match="no transport"):
        world.choose(world.survey(preference="pigeon"))


def test_a_link_that_nobody_wants_any_more_is_not_dialled_and_is_no_failure(make: Make) -> None:
    world = make(one=1e9, two=1e9)
    world.is_wanted = False
    with pytest.raises(LinkClosedError, match="closed"):
        world.choose(world.survey())
    assert (world.links, world.table.rows()) == ([], [])


@pytest.mark.parametrize("preference", ["auto", "one"])
def test_a_link_that_is_closed_while_it_is_measured_leaves_nothing_behind(make: Make, preference: str) -> None:
    world = make(one=1e9, two=1e9)

    def close() -> None:
        world.is_wanted = False
        world.links[-1].close()

    world.on_probe = close
    if preference == "auto":
        with pytest.raises(LinkClosedError, match="closed"):
            world.choose(world.survey(preference=preference))
    else:
        world.choose(world.survey(preference=preference))  # the line is its owner's, which knows
    world.close()
    world.lines.clear()
    assert world.table.rows() == []
    assert all(link.is_released for link in world.links)


def test_a_forced_transport_is_measured_on_its_own_connection(make: Make) -> None:
    world = make(one=1e9, two=4e9)
    chosen = world.choose(world.survey(preference="one"))
    assert (chosen.reason, world.dialled()) == ("configured", ["one"])
    assert world.table.fresh(("a", "b", "one")) is not None
    assert world.table.fresh(("a", "b", "two")) is None


@pytest.mark.parametrize("preference", ["auto", "one"])
def test_a_receiver_that_stands_still_keeps_no_other_worker_waiting(
    make: Make, monkeypatch: pytest.MonkeyPatch, preference: str
) -> None:
    """Stopped while it is measured: the link has no room any more, and the measuring thread holds the hosts' turn."""
    monkeypatch.setattr(survey_module, "ANSWER_TIMEOUT_S", 0.01)
    world = make(one=1e9, two=1e9)
    world.on_probe = lambda: setattr(world, "has_room", False)
    world.choose(world.survey("d0", preference))
    assert world.links[0].is_closed
    assert world.table.fresh(("a", "b", "one")) is None
    world.has_room, world.on_probe = True, lambda: None
    monkeypatch.setattr(survey_module, "ANSWER_TIMEOUT_S", 30.0)  # however busy the machine is
    world.choose(world.survey("d1", preference))
    assert world.table.fresh(("a", "b", "one")) is not None


def test_a_refused_probe_counts_as_failed(make: Make) -> None:
    world = make(one=1e9, two=1e9)
    world.answer = ReplyKind.FAIL
    world.choose(world.survey())  # with nothing better it is taken all the same
    assert "a probe was refused" in world.table.failure(("a", "b", "one"), "d0")
    assert world.table.fresh(("a", "b", "one")) is None


def test_a_link_far_below_its_measurement_is_measured_again_and_left(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    world = make(one=1e9, two=1e9)
    survey = world.survey()
    chosen = world.choose(survey)
    assert chosen.candidate.endpoint.transport == "one"
    meter = LinkMeter(world.clock)
    care = world.care(survey, chosen, meter)
    care.attend(chosen.line)
    care.join()
    assert world.moves == []  # nothing was slow
    world.speeds["one"] = 1e7
    world.slow_down(meter)
    with caplog.at_level(logging.INFO):
        care.attend(chosen.line)
        care.join()
    assert world.moves == ["two"]
    known = world.table.latest(("a", "b", "one"))
    assert known is not None
    assert known.bytes_per_s == pytest.approx(1e7, rel=0.1)
    slow, moved = [r for r in caplog.records if r.message in ("transfer_link_slow", "transfer_link_moved")]
    assert (slow.message, moved.message) == ("transfer_link_slow", "transfer_link_moved")
    fields = vars(slow)["fields"]
    assert fields["measured"].startswith(("990", "1.00", "9"))
    assert fields["achieved"] == "10 MB/s"
    assert slow.levelno == moved.levelno == logging.WARNING


def test_a_link_far_above_its_measurement_is_measured_again_and_kept(make: Make) -> None:
    """It was measured in a busy moment, which would else stay unnoticed."""
    world = make(one=1e9, two=1e9)
    bad = [
        LinkSpeed(from_host="a", to_host="b", transport=name, peer="d7", bytes_per_s=speed, latency_s=1e-5)
        for name, speed in (("one", 5e6), ("two", 1e6))
    ]
    world.table.learn(bad)
    survey = world.survey()
    chosen = world.choose(survey)
    meter = LinkMeter(world.clock)
    care = world.care(survey, chosen, meter)
    for turn in (1, 2):
        meter.begin()
        world.clock.advance(ENOUGH_BYTES / 1e9)
        meter.wrote(ENOUGH_BYTES)
        care.attend(chosen.line)
        care.join()
        world.clock.advance(FIRST_PAUSE_S)
        known = world.table.latest(("a", "b", "one"))
        assert known is not None
        assert known.bytes_per_s == pytest.approx(1e9, rel=0.1)
        assert known.age_s == pytest.approx(FIRST_PAUSE_S * turn, rel=0.1)  # once is enough
    assert world.moves == []


def test_slow_ends_are_no_slow_link_and_pauses_grow(make: Make) -> None:
    """The link measures as before: it is not left, and not measured again and again."""
    world = make(one=1e9, two=1e9)
    survey = world.survey()
    chosen = world.choose(survey)
    meter = LinkMeter(world.clock)
    care = world.care(survey, chosen, meter)
    measured_at: list[float] = []
    for _ in range(12):
        before = world.table.latest(("a", "b", "one"))
        world.slow_down(meter)
        care.attend(chosen.line)
        care.join()
        after = world.table.latest(("a", "b", "one"))
        assert before is not None
        assert after is not None
        if after.age_s < 1.0:
            measured_at.append(world.clock.now_s())
    gaps = [later - earlier for earlier, later in itertools.pairwise(measured_at)]
    assert world.moves == []
    assert len(gaps) >= 3
    assert all(gap > FIRST_PAUSE_S for gap in gaps)
    assert gaps == sorted(gaps)


def test_a_link_that_is_never_idle_does_not_wait_for_ever(make: Make) -> None:
    world = make(one=1e9, two=1e9)
    survey = world.survey()
    chosen = world.choose(survey)
    meter = LinkMeter(world.clock)
    care = world.care(survey, chosen, meter)
    assert not care.is_overdue()
    world.slow_down(meter)
    assert not care.is_overdue()
    world.clock.advance(PATIENCE_S + 0.1)
    assert care.is_overdue()


def test_a_better_transport_that_failed_is_tried_again_and_taken(make: Make) -> None:
    world = make(one=0.0, two=1e9)
    survey = world.survey()
    chosen = world.choose(survey)
    care = world.care(survey, chosen, LinkMeter(world.clock))
    world.speeds["one"] = 1e9
    care.attend(chosen.line)
    care.join()
    assert world.moves == []  # too early
    world.clock.advance(11.0)
    care.attend(chosen.line)
    care.join()
    assert world.moves == ["one"]
    assert world.table.failure(("a", "b", "one"), "d0") == ""


def test_what_others_measure_does_not_keep_a_failed_transport_from_its_next_try(make: Make) -> None:
    """Between these hosts it works; to this worker it failed, which only another try can take back."""
    world = make(one=4e9, two=1e9)
    world.choose(world.survey("d7"))
    world.speeds["one"] = 0.0
    survey = world.survey("d0")
    chosen = world.choose(survey)
    assert chosen.candidate.endpoint.transport == "two"
    care = world.care(survey, chosen, LinkMeter(world.clock))
    world.speeds["one"] = 4e9
    world.clock.advance(11.0)
    care.attend(chosen.line)
    care.join()
    assert world.table.failure(("a", "b", "one"), "d0") == ""
    assert world.moves == ["one"]
    assert not survey.has_due_retry(chosen.candidate)  # or a thread would be made for nothing, five times a second


def test_a_forced_transport_is_never_left(make: Make) -> None:
    world = make(one=1e9, two=1e9)
    survey = world.survey(preference="one")
    chosen = world.choose(survey)
    meter = LinkMeter(world.clock)
    care = world.care(survey, chosen, meter)
    world.speeds["one"] = 1e7
    world.slow_down(meter)
    care.attend(chosen.line)
    care.join()
    assert world.moves == []
    known = world.table.latest(("a", "b", "one"))
    assert known is not None
    assert known.bytes_per_s < 2e7


def test_what_others_measured_spares_the_measuring(make: Make) -> None:
    world = make(one=1e9, two=1e9)
    told = [
        LinkSpeed(from_host="a", to_host="b", transport="one", peer="d7", bytes_per_s=1e8, age_s=20.0),
        LinkSpeed(from_host="a", to_host="b", transport="two", peer="d7", bytes_per_s=1e9, age_s=20.0),
    ]
    world.table.learn(told)
    chosen = world.choose(world.survey())
    assert (chosen.candidate.endpoint.transport, world.dialled()) == ("two", ["two"])
