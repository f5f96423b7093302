"""Requests that a worker works on, findable by engine key, by router and by deadline; names of fetches for them.

fetch~chatcmpl-7#1/48213        the hold, at both ends, of transfer 48213 for attempt 1 of chatcmpl-7

A request may be fetched for and handed over between the same two workers at the same time: the mark shows which of the
two a message is about, also after that has ended.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from tandem.core.ids import Attempt, RequestId, RouterId, TransferId
from tandem.core.ledger import Holder, HoldKind
from tandem.engine.request import EngineRequest

_FETCH = "fetch~"


@dataclass(slots=True, kw_only=True)
class Tracked:
    """One attempt of a request here. `engine_request` is what the engine runs or would run."""

    router: RouterId
    request: RequestId
    attempt: Attempt
    deadline_s: float
    engine_request: EngineRequest
    salt: bytes = b""
    """The tenant's salt, for roots of blocks that came here in another form."""
    trace: str = ""
    """The id of its trace, for logs; "" = none."""
    has_reported_cached: bool = False
    computing_since_s: float = 0.0
    """Start of the first step with a part of its prompt; 0 = none yet."""
    phase_s: float = 0.0
    """Time in its phase when its first token here was sampled; 0 = not yet."""
    ended_choices: set[int] = field(default_factory=set)
    """Choices that are no longer wanted; see EndChoices."""

    @property
    def key(self) -> str:
        return self.engine_request.key

    @property
    def names(self) -> dict[str, Any]:
        """Its names in logs."""
        return {"request": self.key, **({"trace": self.trace} if self.trace else {})}

    @property
    def received_s(self) -> float:
        return self.engine_request.arrival_s


def request_key(request: str, attempt: int) -> str:
    """The engine key of an attempt."""
    return f"{request}#{attempt}"


def fetch_name(request: RequestId) -> RequestId:
    """The request of a fetch's ticket."""
    return RequestId(f"{_FETCH}{request}")


def is_fetch(request: str) -> bool:
    return request.startswith(_FETCH)


def fetch_holder(kind: HoldKind, name: RequestId, attempt: Attempt, transfer: TransferId) -> Holder:
    """Return the holder of a fetch's blocks: RESERVED at the requester, PUSHING at the holder."""
    return Holder(kind, f"{request_key(name, attempt)}/{transfer}")


class RequestTable:
    """All tracked attempts, and tombstones of ended ones so that late messages about them are recognised."""

    def __init__(self, tombstone_s: float) -> None:
        self._by_key: dict[str, Tracked] = {}
        self._tombstones: OrderedDict[RequestId, tuple[Attempt, float]] = OrderedDict()
        self._tombstone_s = tombstone_s

    def __len__(self) -> int:
        return len(self._by_key)

    def add(self, tracked: Tracked) -> None:
        self._by_key[tracked.key] = tracked

    def get(self, key: str) -> Tracked | None:
        return self._by_key.get(key)

    def remove(self, key: str) -> Tracked | None:
        """Forget an attempt; None if it is not here."""
        return self._by_key.pop(key, None)

    def add_tombstone(self, request: RequestId, attempt: Attempt, now_s: float) -> None:
        """Mark attempts up to this one as over: messages about them are late."""
        known = self._tombstones.pop(request, (Attempt(0), 0.0))[0]
        self._tombstones[request] = (max(known, attempt), now_s + self._tombstone_s)
        while self._tombstones:
            oldest = next(iter(self._tombstones))
            if self._tombstones[oldest][1] > now_s:
                break
            del self._tombstones[oldest]

    def is_buried(self, request: RequestId, attempt: Attempt) -> bool:
        tombstone = self._tombstones.get(request)
        return tombstone is not None and attempt <= tombstone[0]

    def attempts(self, request: RequestId, up_to: Attempt) -> list[Tracked]:
        """Attempts of a request here that are not newer than `up_to`."""
        return [t for t in self._by_key.values() if t.request == request and t.attempt <= up_to]

    def of_router(self, router: RouterId) -> list[Tracked]:
        return [t for t in self._by_key.values() if t.router == router]

    def overdue(self, now_s: float) -> list[Tracked]:
        return [t for t in self._by_key.values() if t.deadline_s <= now_s]

    def all(self) -> list[Tracked]:
        return list(self._by_key.values())
