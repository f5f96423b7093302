"""Test live status: merged workers, curves and the stream of events."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import orjson
import pytest

from tandem.core.clock import ManualClock, MonotonicClock
from tandem.core.errors import CapacityError, UnavailableError
from tandem.router.admin.page import live_events
from tandem.router.admin.page.live_events import LiveEvents, trimmed
from tandem.router.admin.page.timeseries import SLOT_S, SLOTS, TimeSeries, added_up, curves, quantile
from tandem.router.admin.status import workers_of
from tandem.router.metrics.router import Metrics
from tools.waiting import wait_for_async


def row(worker: str = "d0", **said: Any) -> dict[str, Any]:
    fine = {"is_connected": True, "is_registered": True, "state": "ready", "trouble": "", "breaker": "closed"}
    return {"worker": worker, "incarnation": "7", "router_in_flight": 0, **fine, **said}


def together(*rows: dict[str, Any]) -> dict[str, Any]:
    (found,) = workers_of([{"workers": [one]} for one in rows])
    return found


HEARD: dict[str, Any] = {"role": "decode", "in_flight": 3}
AWAY: dict[str, Any] = {"is_connected": False, "state": "unreachable"}


def test_requests_are_added_and_what_the_worker_reported_is_not() -> None:
    found = together(row(router_in_flight=2, **HEARD), row(router_in_flight=1, **HEARD))
    assert (found["router_in_flight"], found["in_flight"]) == (3, 3)


@pytest.mark.parametrize(
    ("states", "shown"),
    [
        (("closed", "open"), "open"),
        (("open", "half_open"), "open"),
        (("half_open", "closed"), "half_open"),
        (("closed", "closed"), "closed"),
    ],
)
def test_an_open_breaker_of_one_is_seen(states: tuple[str, ...], shown: str) -> None:
    assert together(*(row(breaker=state) for state in states))["breaker"] == shown


@pytest.mark.parametrize("is_first", [True, False])
def test_a_worker_that_one_cannot_reach_is_not_ready_and_what_it_told_the_other_is_kept(*, is_first: bool) -> None:
    rows = [row(**AWAY, trouble="refused", router_in_flight=1), row(**HEARD, router_in_flight=4)]
    found = together(*(rows if is_first else reversed(rows)))
    assert (found["is_connected"], found["state"], found["trouble"]) == (False, "unreachable", "refused")
    assert (found["role"], found["in_flight"], found["router_in_flight"]) == ("decode", 3, 5)


def test_it_is_gone_when_nobody_sees_it_registered() -> None:
    gone = row(is_connected=False, is_registered=False, state="gone")
    assert together(gone, gone)["state"] == "gone"
    found = together(gone, row(**HEARD))
    assert (found["is_registered"], found["state"]) == (True, "unreachable")


def test_who_drains_for_one_drains() -> None:
    assert together(row(**HEARD), row(**HEARD, state="draining"))["state"] == "draining"


def test_a_worker_of_one_process_alone_is_among_the_others() -> None:
    pages: list[dict[str, Any]] = [
        {"workers": [row("d1")]},
        {"workers": [row("d0"), row("d1", router_in_flight=1)]},
        {"workers": []},
    ]
    assert [(one["worker"], one["router_in_flight"]) for one in workers_of(pages)] == [("d0", 0), ("d1", 1)]


class Wall:
    def __init__(self) -> None:
        self.now_s = 1000 * SLOT_S

    def __call__(self) -> float:
        return self.now_s

    def next_slot(self) -> None:
        self.now_s += SLOT_S


def made() -> tuple[Metrics, Wall, TimeSeries]:
    metrics, wall = Metrics(list, lambda: 0), Wall()
    return metrics, wall, TimeSeries(metrics, wall)


def test_a_slot_has_what_was_added_in_it() -> None:
    metrics, wall, noted = made()
    for seconds in (0.1, 0.1, 0.1, 4.0):
        metrics.of("m").ttft.observe(seconds)
    metrics.of("m").generated_tokens.inc(50)
    metrics.of("m").prompt_tokens.inc(30)
    metrics.of("m").cached_tokens.inc(10)
    for outcome in ("met", "met", "missed", "cancelled"):
        metrics.slo("chat", outcome)
    for outcome in ("ok", "ok", "cancelled", "overloaded"):
        metrics.request_ended("chat", outcome)
    wall.next_slot()
    noted.note()
    wall.next_slot()
    noted.note()
    metrics.of("m").itl.observe(0.02)
    wall.next_slot()
    noted.note()
    shown = curves(noted.raw())
    first, second, third = shown["slots"]
    assert [slot["at_s"] for slot in shown["slots"]] == [1000 * SLOT_S, 1001 * SLOT_S, 1002 * SLOT_S]
    assert 0.08 < first["ttft_p50_s"] <= 0.1
    assert 2.0 < first["ttft_p99_s"] <= 5.0
    assert first["itl_p50_s"] is None
    assert (first["goodput_per_s"], first["kept"]) == (2 / SLOT_S, pytest.approx(2 / 3))
    assert (first["answers_per_s"], first["failed"]) == (4 / SLOT_S, 1)
    assert (first["output_tokens_per_s"], first["prompt_tokens_per_s"]) == (50 / SLOT_S, 30 / SLOT_S)
    assert (second["ttft_p50_s"], second["goodput_per_s"], second["answers_per_s"]) == (None, None, 0)
    assert 0.015 < third["itl_p99_s"] <= 0.02
    assert (shown["totals"]["prompt_tokens"], shown["totals"]["cached_tokens"]) == (30, 10)


def test_a_quarter_of_an_hour_is_kept() -> None:
    _, wall, noted = made()
    for _ in range(SLOTS + 5):
        wall.next_slot()
        noted.note()
    slots = noted.raw()["slots"]
    assert len(slots) == SLOTS
    assert slots[-1]["slot"] == 1000 + SLOTS + 4


def test_processes_are_added_slot_by_slot() -> None:
    raws = []
    for seconds, late in ((0.1, False), (4.0, False), (0.1, True)):
        metrics, wall, noted = made()
        if late:
            wall.next_slot()
        metrics.of("m").ttft.observe(seconds)
        metrics.of("m").prompt_tokens.inc(7)
        wall.next_slot()
        noted.note()
        raws.append(noted.raw())
    both, alone = added_up(raws)["slots"]
    assert (both["slot"], alone["slot"]) == (1000, 1001)
    assert both["counts"]["prompt_tokens"] == 14
    assert (both["ttft"]["0.1"], both["ttft"]["+Inf"]) == (1, 2)
    assert quantile(both["ttft"], 0.99) == pytest.approx(4.94)
    assert len(added_up([{"slots": [{**alone, "slot": number} for number in range(SLOTS + 9)]}])["slots"]) == SLOTS


def test_quantiles_lie_evenly_between_two_bounds() -> None:
    buckets = {"1.0": 0, "2.0": 10, "+Inf": 10}
    assert quantile(buckets, 0.5) == 1.5
    assert quantile({"1.0": 0, "2.0": 0, "+Inf": 3}, 0.5) == 2.0, "no more is known of what is above the last bound"
    assert quantile({}, 0.5) is None
    assert quantile({"1.0": 0, "+Inf": 0}, 0.5) is None


def test_slots_are_noted_as_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    _, wall, noted = made()
    wall.now_s += 1.5
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            raise asyncio.CancelledError
        wall.now_s += seconds

    monkeypatch.setattr(asyncio, "sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(noted.run())
    assert pauses == [SLOT_S - 1.5, SLOT_S, SLOT_S]
    assert [slot["slot"] for slot in noted.raw()["slots"]] == [1000, 1001]


class Section:
    """Returns `value`, and counts its calls."""

    def __init__(self, value: Any) -> None:
        self.value, self.asked = value, 0

    async def __call__(self) -> Any:
        self.asked += 1
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


def parsed(frames: bytes) -> dict[str, Any]:
    found = {}
    for frame in frames.decode().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in frame.splitlines() if not line.startswith(":"))
        if lines:
            found[lines["event"]] = orjson.loads(lines["data"])
    return found


async def test_all_at_first_then_what_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_events, "LOOK_S", 0.001)
    still, moving = Section({"a": 1}), Section({"b": 1})
    handlers = LiveEvents({"still": still, "moving": moving}, MonotonicClock())
    async with aclosing(_of(handlers)) as frames:
        assert parsed(await anext(frames)) == {"still": {"a": 1}, "moving": {"b": 1}}
        assert await anext(frames) == b":\n\n", "nothing changed, and the page hears that somebody is there"
        moving.value = {"b": 2}
        assert parsed(await anext(frames)) == {"moving": {"b": 2}}


async def test_however_many_look_it_is_read_once() -> None:
    section, clock = Section({"a": 1}), ManualClock()
    handlers = LiveEvents({"section": section}, clock)
    for _ in range(5):
        async with aclosing(_of(handlers)) as frames:
            assert parsed(await anext(frames)) == {"section": {"a": 1}}
    assert section.asked == 1
    clock.advance(live_events.LOOK_S)
    async with aclosing(_of(handlers)) as frames:
        await anext(frames)
    assert section.asked == 2


async def test_a_section_that_fails_or_hangs_says_so_and_the_others_go_on() -> None:
    async def hanging() -> Any:
        await asyncio.Event().wait()

    sections: dict[str, live_events.Read] = {
        "gone": Section(UnavailableError("the store does not answer", todo="wait")),
        "wrong": Section(RuntimeError("a secret")),
        "hanging": hanging,
        "good": Section([1]),
    }
    async with aclosing(_of(LiveEvents(sections, ManualClock(), read_s=0.02))) as frames:
        said = parsed(await anext(frames))
    assert said["gone"] == {"error": "the store does not answer. Wait."}
    assert said["wrong"] == {"error": "the router failed: RuntimeError"}
    assert "no hanging within" in said["hanging"]["error"]
    assert said["good"] == [1]


async def test_large_clusters_are_shown_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_events, "LOOK_S", 0.001)
    pauses: list[float] = []
    handlers = LiveEvents({"large": Section("x" * 3 * live_events.BYTES_PER_S)}, MonotonicClock())

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(handlers, "_pause", pause)
    async with aclosing(_of(handlers)) as frames:
        await anext(frames)
        await anext(frames)
    assert pauses[0] == pytest.approx(3, rel=0.01)


async def test_a_stream_ends_with_the_router_and_after_a_while() -> None:
    clock = ManualClock()
    handlers = LiveEvents({"section": Section(1)}, clock)
    async with aclosing(_of(handlers)) as frames:
        await anext(frames)
        clock.advance(live_events.LIFE_S)
        assert [frame async for frame in frames] == [], "whose key was revoked is not let in again"
    async with aclosing(_of(handlers)) as frames:
        await anext(frames)
        handlers.end()
        assert [frame async for frame in frames] == []


async def serve(handlers: LiveEvents, send: Any, left: asyncio.Event) -> None:
    async def receive() -> dict[str, Any]:
        await left.wait()
        return {"type": "http.disconnect"}

    await handlers.open()({"type": "http", "asgi": {"spec_version": "2.3"}}, receive, send)


async def test_who_stands_still_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_events, "STALL_S", 0.02)
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    handlers = LiveEvents({"section": Section(1)}, MonotonicClock())
    async with asyncio.timeout(20):
        await serve(handlers, send, asyncio.Event())
    assert handlers.viewers == 0
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]


async def test_so_many_may_look_and_one_more_once_one_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_events, "MAX_VIEWERS", 2)

    async def send(message: dict[str, Any]) -> None:
        return

    handlers, left = LiveEvents({"section": Section(1)}, MonotonicClock()), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for _ in range(2):
            group.create_task(serve(handlers, send, left))
        await wait_for_async(lambda: handlers.viewers == 2)
        with pytest.raises(CapacityError, match="2 pages look at this router"):
            handlers.open()
        left.set()
    assert handlers.viewers == 0
    handlers.open()


def test_a_worker_s_line_is_short() -> None:
    row = {"worker": "d0", "state": "ready", "fingerprint": "f" * 32, "counters": {"step_seconds": 1.5, "other": 2}}
    assert trimmed({"cluster": "c", "workers": [row]}) == {
        "cluster": "c",
        "workers": [{"worker": "d0", "state": "ready", "counters": {"step_seconds": 1.5}}],
    }


async def _of(handlers: LiveEvents) -> AsyncGenerator[bytes, None]:
    async for frames in handlers.frames():
        yield frames
