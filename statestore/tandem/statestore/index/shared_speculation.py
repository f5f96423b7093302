"""Speculation that routers share: each publishes the prompts that it sent where, within a millisecond or two.

A prompt that waits in a worker's queue is not in Redis before it is computed. Without notice from its router, the
others would send the next prompts of the same burst elsewhere. Sent over a Redis channel: a message that is lost there,
or has no listener, costs a computation. A router that is alone sends nothing but a probe a second.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

from redis.asyncio import Redis

from tandem.core.block_hash import HASH_BYTES, BlockHash
from tandem.core.clock import Clock
from tandem.core.ids import Incarnation, WorkerId
from tandem.statestore.connection import OUTAGE, Backoff
from tandem.statestore.index.speculation import MAX_BLOCKS, PENDING_S, Speculation
from tandem.statestore.keys import Keys

_log = logging.getLogger(__name__)

MAX_UNTOLD: Final = 512
"""News that wait for Redis; past it the oldest are dropped."""
MAX_TOLD_BLOCKS: Final = 512
"""Limit for one prompt: blocks behind them are found by the worker's own events."""
_NEWS_A_MESSAGE: Final = 8
"""So that a listener reads 4,096 blocks at most between two turns of its loop."""
_MAX_ID_BYTES: Final = 255
_LAZY_S: Final = 0.25
"""Ends may be sent so much later, together with something that is urgent."""
_PROBE_S: Final = 1.0
_LISTEN_S: Final = 1.0
_NOBODY: Final = Incarnation(0)
_HEAD: Final = struct.Struct("<Q")
_NEWS: Final = struct.Struct("<BBBQH")


class HintKind(IntEnum):
    """News of a prompt: sent to a worker, computed there, or not to be computed there any more."""

    SENT = 0
    SETTLED = 1
    WITHDRAWN = 2


@dataclass(frozen=True, slots=True)
class News:
    """One prompt at one worker. `incarnation` and `hashes` matter for SENT alone."""

    kind: HintKind
    request: str
    worker: WorkerId
    incarnation: Incarnation = _NOBODY
    hashes: Sequence[BlockHash] = ()


class SharedSpeculation(Speculation):
    """A `Speculation` that also knows what other routers of the cluster sent, while `run` runs; bounded as one: others'
    prompts go first. The end of every prompt that it announced is sent, also of those that it has no room for any more.

    `router` is this router's incarnation: its own messages come back to it, and are left out. `told` and `heard` count
    prompts that were sent.
    """

    def __init__(
        self, redis: Redis, keys: Keys, clock: Clock, router: Incarnation, *, max_blocks: int = MAX_BLOCKS
    ) -> None:
        super().__init__(clock, max_blocks=max_blocks)
        self._redis: Any = redis  # its stubs mix plain and awaitable results
        self._channel, self._router, self._clock = keys.sent_channel, router, clock
        self._untold: deque[News] = deque(maxlen=MAX_UNTOLD)
        self._open: OrderedDict[tuple[str, WorkerId], float] = OrderedDict()  # sent, not over; until when it matters
        self._is_urgent = asyncio.Event()
        self._is_alone = True
        self._probed_s = float("-inf")
        self.told = self.heard = 0

    @property
    def is_alone(self) -> bool:
        """True if no other router listened when this one last published."""
        return self._is_alone

    def expect(self, request: str, worker: WorkerId, incarnation: Incarnation, hashes: Sequence[BlockHash]) -> None:
        """As `Speculation`; also published to the others."""
        super().expect(request, worker, incarnation, hashes)
        if hashes and not self._may_be_silent():
            self._note(News(HintKind.SENT, request, worker, incarnation, hashes[:MAX_TOLD_BLOCKS]))
            self._remember((request, worker))
            self.told += 1
            self._is_urgent.set()

    def settle(self, request: str, worker: WorkerId) -> bool:
        """As `Speculation`; also published to the others."""
        return self._over(HintKind.SETTLED, request, worker, super().settle(request, worker))

    def withdraw(self, request: str, worker: WorkerId) -> bool:
        """As `Speculation`; also published to the others."""
        return self._over(HintKind.WITHDRAWN, request, worker, super().withdraw(request, worker))

    async def run(self) -> None:
        """Publish and listen until cancelled; survives outages."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._listen())
            await self._tell()

    def hear(self, message: bytes) -> None:
        """Take in a router's message; ValueError if it is no such message."""
        router, every = unpack(message)
        if router == self._router:
            return
        for news in every:
            key = (f"{router}/{news.request}", news.worker)
            if news.kind is HintKind.SENT:
                self.heard += 1
                self._expect(self._heard, key, news.incarnation, news.hashes)
            elif news.kind is HintKind.SETTLED:
                self._settle(self._heard, key)
            else:
                self._withdraw(self._heard, key)

    def _over(self, kind: HintKind, request: str, worker: WorkerId, was_pending: bool) -> bool:
        if self._open.pop((request, worker), None) is not None:
            self._note(News(kind, request, worker))
        return was_pending

    def _remember(self, key: tuple[str, WorkerId]) -> None:
        now_s = self._clock.now_s()
        self._open[key] = now_s + PENDING_S
        self._open.move_to_end(key)
        while len(self._open) > MAX_BLOCKS or next(iter(self._open.values())) <= now_s:
            self._open.popitem(last=False)

    def _note(self, news: News) -> None:
        if max(len(news.request.encode()), len(news.worker.encode())) <= _MAX_ID_BYTES:
            self._untold.append(news)

    def _may_be_silent(self) -> bool:
        return self._is_alone and self._clock.now_s() - self._probed_s < _PROBE_S

    async def _tell(self) -> None:
        backoff = Backoff()
        while True:
            await self._wait_for_news()
            batch = [self._untold.popleft() for _ in range(min(_NEWS_A_MESSAGE, len(self._untold)))]
            if self._untold:
                self._is_urgent.set()
            if not batch:
                continue
            self._probed_s = self._clock.now_s()
            try:
                self._is_alone = await self._redis.publish(self._channel, pack(self._router, batch)) <= 1
            except OUTAGE as error:
                _log.warning("others not told what was sent", extra={"fields": {"why": str(error)}})
                self._untold.clear()
                await backoff.pause()
            else:
                backoff.reset()
                for news in batch if self._is_alone else ():
                    self._open.pop((news.request, news.worker), None)  # no router received it

    async def _wait_for_news(self) -> None:
        try:
            async with asyncio.timeout(_LAZY_S):
                await self._is_urgent.wait()
        except TimeoutError:
            pass
        self._is_urgent.clear()

    async def _listen(self) -> None:
        backoff = Backoff()
        while True:
            pubsub: Any = self._redis.pubsub()
            try:
                try:
                    await pubsub.subscribe(self._channel)
                    while True:
                        message = await pubsub.get_message(ignore_subscribe_messages=True, timeout=_LISTEN_S)
                        if message is not None:
                            self._hear(message["data"])
                            await asyncio.sleep(0)
                        backoff.reset()
                finally:
                    await pubsub.aclose()
            except OUTAGE:
                await backoff.pause()

    def _hear(self, message: bytes) -> None:
        try:
            self.hear(message)
        except ValueError as error:
            _log.warning("unreadable news of a router", extra={"fields": {"why": str(error)}})


def pack(router: Incarnation, every: Sequence[News]) -> bytes:
    """A message of `router`; ids have at most 255 bytes."""
    parts = [_HEAD.pack(router)]
    for news in every:
        request, worker = news.request.encode(), news.worker.encode()
        head = _NEWS.pack(news.kind, len(request), len(worker), news.incarnation, len(news.hashes))
        parts += [head, request, worker, *news.hashes]
    return b"".join(parts)


def unpack(message: bytes) -> tuple[Incarnation, list[News]]:
    """Return the sender, and its news; ValueError if it is no such message."""
    if len(message) < _HEAD.size:
        raise ValueError("too short")
    (router,) = _HEAD.unpack_from(message)
    return Incarnation(router), list(_news(message, _HEAD.size))


def _news(message: bytes, at: int) -> Iterator[News]:
    while at < len(message):
        if at + _NEWS.size > len(message):
            raise ValueError("cut short")
        kind, request_bytes, worker_bytes, incarnation, count = _NEWS.unpack_from(message, at)
        ids = at + _NEWS.size
        blocks = ids + request_bytes + worker_bytes
        at = blocks + count * HASH_BYTES
        if at > len(message):
            raise ValueError("cut short")
        yield News(
            HintKind(kind),
            message[ids : ids + request_bytes].decode(),
            WorkerId(message[ids + request_bytes : blocks].decode()),
            Incarnation(incarnation),
            [BlockHash(message[start : start + HASH_BYTES]) for start in range(blocks, at, HASH_BYTES)],
        )
