"""The stream that keeps pages up to date: read once for all, changes alone, and no client can hold it up."""

from __future__ import annotations

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
from tools.waiting import wait_for_async


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


def test_all_at_first_then_what_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_events, "LOOK_S", 0.001)
    still, moving = Section({"a": 1}), Section({"b": 1})

    async def run() -> None:
        handlers = LiveEvents({"still": still, "moving": moving}, MonotonicClock())
        async with aclosing(_of(handlers)) as frames:
            assert parsed(await anext(frames)) == {"still": {"a": 1}, "moving": {"b": 1}}
            assert await anext(frames) == b":\n\n", "nothing changed, and the page hears that somebody is there"
            moving.value = {"b": 2}
            assert parsed(await anext(frames)) == {"moving": {"b": 2}}

    asyncio.run(run())


def test_however_many_look_it_is_read_once() -> None:
    section, clock = Section({"a": 1}), ManualClock()

    async def run() -> None:
        handlers = LiveEvents({"section": section}, clock)
        for _ in range(5):
            async with aclosing(_of(handlers)) as frames:
                assert parsed(await anext(frames)) == {"section": {"a": 1}}
        assert section.asked == 1
        clock.advance(live_events.LOOK_S)
        async with aclosing(_of(handlers)) as frames:
            await anext(frames)
        assert section.asked == 2

    asyncio.run(run())


def test_a_section_that_fails_or_hangs_says_so_and_the_others_go_on() -> None:
    async def hanging() -> Any:
        await asyncio.Event().wait()

    sections: dict[str, live_events.Read] = {
        "gone": Section(UnavailableError("the store does not answer", todo="wait")),
        "wrong": Section(RuntimeError("a secret")),
        "hanging": hanging,
        "good": Section([1]),
    }

    async def run() -> None:
        async with aclosing(_of(LiveEvents(sections, ManualClock(), read_s=0.02))) as frames:
            said = parsed(await anext(frames))
        assert said["gone"] == {"error": "the store does not answer. Wait."}
        assert said["wrong"] == {"error": "the router failed: RuntimeError"}
        assert "no hanging within" in said["hanging"]["error"]
        assert said["good"] == [1]

    asyncio.run(run())


def test_large_clusters_are_shown_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_events, "LOOK_S", 0.001)
    pauses: list[float] = []

    async def run() -> None:
        handlers = LiveEvents({"large": Section("x" * 3 * live_events.BYTES_PER_S)}, MonotonicClock())

        async def pause(seconds: float) -> None:
            pauses.append(seconds)

        monkeypatch.setattr(handlers, "_pause", pause)
        async with aclosing(_of(handlers)) as frames:
            await anext(frames)
            await anext(frames)
        assert pauses[0] == pytest.approx(3, rel=0.01)

    asyncio.run(run())


def test_a_stream_ends_with_the_router_and_after_a_while() -> None:
    clock = ManualClock()

    async def run() -> None:
        handlers = LiveEvents({"section": Section(1)}, clock)
        async with aclosing(_of(handlers)) as frames:
            await anext(frames)
            clock.advance(live_events.LIFE_S)
            assert [frame async for frame in frames] == [], "whose key was revoked is not let in again"
        async with aclosing(_of(handlers)) as frames:
            await anext(frames)
            handlers.end()
            assert [frame async for frame in frames] == []

    asyncio.run(run())


async def serve(handlers: LiveEvents, send: Any, left: asyncio.Event) -> None:
    async def receive() -> dict[str, Any]:
        await left.wait()
        return {"type": "http.disconnect"}

    await handlers.open()({"type": "http", "asgi": {"spec_version": "2.3"}}, receive, send)


def test_who_stands_still_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_events, "STALL_S", 0.02)
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def run() -> None:
        handlers = LiveEvents({"section": Section(1)}, MonotonicClock())
        async with asyncio.timeout(20):
            await serve(handlers, send, asyncio.Event())
        assert handlers.viewers == 0
        assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]

    asyncio.run(run())


def test_so_many_may_look_and_one_more_once_one_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_events, "MAX_VIEWERS", 2)

    async def send(message: dict[str, Any]) -> None:
        return

    async def run() -> None:
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

    asyncio.run(run())


def test_a_worker_s_line_is_short() -> None:
    row = {"worker": "d0", "state": "ready", "fingerprint": "f" * 32, "counters": {"step_seconds": 1.5, "other": 2}}
    assert trimmed({"cluster": "c", "workers": [row]}) == {
        "cluster": "c",
        "workers": [{"worker": "d0", "state": "ready", "counters": {"step_seconds": 1.5}}],
    }


async def _of(handlers: LiveEvents) -> AsyncGenerator[bytes, None]:
    async for frames in handlers.frames():
        yield frames
