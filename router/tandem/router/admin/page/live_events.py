"""One stream (server-sent events) of the page's sections: whatever has changed of status, links, desired state and the
rest, for as long as a viewer is connected.

However many are, everything is read once every LOOK_S. A reader that is slow misses what came meanwhile and gets the
latest; one that stands still is given up.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import orjson
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from tandem.core.clock import Clock
from tandem.core.errors import CapacityError, TandemError

_log = logging.getLogger(__name__)
LOOK_S = 0.5
READ_S = 1.0
MAX_VIEWERS = 16
LIFE_S = 60.0
"""Maximum life of one stream. The page asks for the next one at once, and so shows its key again: it may have been
revoked."""
STALL_S = 10.0
BYTES_PER_S = 512 * 1024
"""At most, for one reader: large clusters are shown less often."""
_WORKER = (
    "worker", "state", "role", "model", "revision", "trouble", "tp", "is_connected", "is_registered", "in_flight",
    "router_in_flight", "queued_requests", "running_requests", "queued_tokens", "prefill_tokens_per_s", "decode_step_s",
    "blocks", "version",
)  # fmt: skip
_COUNTERS = ("step_seconds", "prefill_tokens", "decode_tokens", "kv_sent_bytes")
"""Counters of a worker that the page makes rates of."""
Read = Callable[[], Awaitable[Any]]


class LiveEvents:
    """`sections`: how to read each, as plain values; `read_s`: how long one may take, it is reported late afterwards.
    Belongs to the event loop."""

    def __init__(self, sections: Mapping[str, Read], clock: Clock, read_s: float = READ_S) -> None:
        self._sections, self._clock, self._read_s = dict(sections), clock, read_s
        self._said: dict[str, bytes] = {}
        self._due_s = -math.inf
        self._looking = asyncio.Lock()
        self._ended = asyncio.Event()
        self.viewers = 0

    def open(self) -> LiveStream:
        """A stream for one more viewer; CapacityError where there are too many."""
        if self.viewers >= MAX_VIEWERS:
            raise CapacityError(
                f"{self.viewers} pages look at this router", why=f"the limit is {MAX_VIEWERS}", todo="close one of them"
            )
        return LiveStream(self)

    def end(self) -> None:
        """Every stream ends soon: the router stops."""
        self._ended.set()

    async def frames(self) -> AsyncIterator[bytes]:
        """Everything at first, then what has changed; a comment where nothing has."""
        seen: dict[str, bytes] = {}
        ends_s = self._clock.now_s() + LIFE_S
        while not self._ended.is_set() and self._clock.now_s() < ends_s:
            said = await self._look()
            news = [_frame(name, body) for name, body in said.items() if seen.get(name) != body]
            seen = said
            frames = b"".join(news) or b":\n\n"
            yield frames
            await self._pause(max(LOOK_S, len(frames) / BYTES_PER_S))

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._ended.wait()
        except TimeoutError:
            return

    async def _look(self) -> dict[str, bytes]:
        """Current content of every section, at most LOOK_S old."""
        async with self._looking:
            if self._clock.now_s() >= self._due_s:
                bodies = await asyncio.gather(*(self._read(name, read) for name, read in self._sections.items()))
                self._said = dict(zip(self._sections, bodies, strict=True))
                self._due_s = self._clock.now_s() + LOOK_S
            return self._said

    async def _read(self, name: str, read: Read) -> bytes:
        try:
            async with asyncio.timeout(self._read_s):
                return orjson.dumps(await read())
        except TandemError as error:
            return orjson.dumps({"error": error.message})
        except TimeoutError:
            return orjson.dumps({"error": f"no {name} within {self._read_s:g} s"})
        except Exception as error:  # noqa: BLE001 - the other sections go on
            _log.exception("the page's %s cannot be read", name)
            return orjson.dumps({"error": f"the router failed: {type(error).__name__}"})


class LiveStream(StreamingResponse):
    """The response to one viewer; it ends when that one reads nothing for STALL_S."""

    def __init__(self, handlers: LiveEvents) -> None:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        super().__init__(handlers.frames(), media_type="text/event-stream", headers=headers)
        self._handlers = handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def bounded(message: Message) -> None:
            async with asyncio.timeout(STALL_S):
                await send(message)

        self._handlers.viewers += 1
        try:
            await super().__call__(scope, receive, bounded)
        except* TimeoutError:
            _log.warning("a page was given up that did not read for %g s", STALL_S)
        finally:
            self._handlers.viewers -= 1


def trimmed(status: dict[str, Any]) -> dict[str, Any]:
    """A status without the fields that the page does not show: workers are many."""
    return {**status, "workers": [_worker(row) for row in status["workers"]]}


def _worker(row: dict[str, Any]) -> dict[str, Any]:
    counters = row.get("counters", {})
    return {
        **{name: row[name] for name in _WORKER if name in row},
        "counters": {name: counters[name] for name in _COUNTERS if name in counters},
    }


def _frame(name: str, body: bytes) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), body)
