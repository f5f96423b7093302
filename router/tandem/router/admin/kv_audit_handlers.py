"""Asks every worker for its books and shows operators the joined result; passes repairs on. Keeps nothing."""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.core.admin_schema import BlockCounts, copied
from tandem.core.clock import Clock
from tandem.core.errors import InvalidRequestError, TandemError
from tandem.core.ids import WorkerId
from tandem.core.ledger import Holder, HoldKind, subject_of
from tandem.core.proto_mapping import from_proto
from tandem.router.admin.block_hold_audit import (
    AttemptKey,
    Auditor,
    Books,
    Claimed,
    Hold,
    HoldVerdict,
    Judged,
    Known,
    Moving,
)
from tandem.router.dispatch.dispatcher import Dispatcher
from tandem.router.workers.connection import WorkerLink
from tandem.router.workers.table import WorkerTable
from tandem.rpc.v1 import worker_pb2 as w
from tandem.statestore.index.events import NOTHING, Position

ANSWER_S = 3.0
"""A worker answers between two steps; one that stands still for longer than this is as good as lost."""
MAX_HOLDS = 10_000
Record = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditHandlers:
    """`look` is one look at all books, `repair` the release of holds that were seen in two."""

    router: str
    table: WorkerTable
    dispatcher: Dispatcher
    clock: Clock
    positions: Callable[[], Mapping[WorkerId, Position]] | None = None
    """How far the index was followed, by worker; None = there is none."""
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    async def look(self) -> Record:
        """Books, verdicts, and workers that did not answer, as plain JSON values."""
        started_s, before = self.clock.now_s(), self._flights()
        answers = await asyncio.gather(*(self._ask(link) for link in self.table.links))
        books = [found for found in answers if isinstance(found, Books)]
        unanswered = dict(found for found in answers if not isinstance(found, Books))
        auditor = Auditor(
            router=self.router, flights=before | self._flights(), books=books, unanswered=tuple(unanswered)
        )
        judged = auditor.judge()
        return {
            "took_s": round(self.clock.now_s() - started_s, 3),
            "router": self.router,
            "workers": [_worker(one, judged) | self._index(one) for one in sorted(books, key=lambda one: one.worker)],
            "unanswered": [{"worker": who, "why": why} for who, why in sorted(unanswered.items())],
            "holds": [_hold(one) for one in judged],
        }

    async def repair(self, wanted: Sequence[Record]) -> Record:
        """Ask the workers to release `wanted` (records of `look`). Only holds that no router knows, and that each
        worker finds fenced for itself, are released. Raises InvalidRequestError for records that are no holds."""
        if len(wanted) > MAX_HOLDS:
            raise InvalidRequestError(f"{len(wanted)} holds are too many at once", todo=f"send {MAX_HOLDS} at most")
        flights = self._flights()
        refused: list[Record] = []
        by_worker: dict[tuple[str, int], list[w.AuditHold]] = defaultdict(list)
        for record in wanted:
            try:
                worker, incarnation, hold = str(record["worker"]), _incarnation_of(record), _hold_to_wire(record)
                attempt = (str(record["request"]), int(record["attempt"]))
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                raise InvalidRequestError("this is not a hold of an audit", why=str(error)) from error
            if attempt in flights:
                refused.append(_named(worker, hold, f"router {self.router} has its request in flight"))
            else:
                by_worker[worker, incarnation].append(hold)
        released: list[Record] = []
        for (worker, incarnation), holds in by_worker.items():
            request = w.RepairRequest(id=next(self._numbers), incarnation=incarnation, holds=holds)
            answer = await self._repair(WorkerId(worker), request)
            if isinstance(answer, str):
                refused += [_named(worker, hold, answer) for hold in holds]
            else:
                released += [_named(worker, hold) for hold in answer.released]
                refused += [_named(worker, refusal.hold, refusal.why) for refusal in answer.refused]
        return {"released": released, "refused": refused}

    async def _repair(self, worker: WorkerId, request: w.RepairRequest) -> w.AuditReport | str:
        link = self.table.link(worker)
        if link is None:
            return "the worker is not here"
        try:
            return await link.ask(w.RouterMessage(repair=request), request.id, ANSWER_S)
        except TandemError as error:
            return error.message

    async def _ask(self, link: WorkerLink) -> Books | tuple[str, str]:
        number = next(self._numbers)
        try:
            answer = await link.ask(w.RouterMessage(audit=w.AuditRequest(id=number)), number, ANSWER_S)
        except TandemError as error:
            return link.worker, error.message
        return books_from_wire(answer)

    def _index(self, books: Books) -> Record:
        """Blocks that the worker's prefix caches hold, beside those that the index has for them."""
        if self.positions is None:
            return {}
        known = self.positions().get(WorkerId(books.worker), NOTHING)
        is_equal = (known.blocks, known.digest) == (books.cached_blocks, int(books.cached_digest or "0", 16))
        counts = {"held_blocks": books.cached_blocks, "known_blocks": known.blocks}
        return {"index": {**counts, "is_equal": is_equal}}

    def _flights(self) -> frozenset[AttemptKey]:
        return frozenset((str(flight.id), int(flight.attempt)) for flight in self.dispatcher.flights)


def _worker(books: Books, judged: Sequence[Judged]) -> Record:
    mine = [one for one in judged if one.books is books]
    explained: dict[int, int] = defaultdict(int)
    for one in mine:
        if one.verdict is HoldVerdict.EXPLAINED:
            explained[one.hold.group] += len(one.hold.blocks)
    return {
        "worker": books.worker,
        "incarnation": str(books.incarnation),
        "role": books.role,
        "requests": len(books.requests),
        "sending": len(books.sending),
        "receiving": len(books.receiving),
        "groups": [dict(group) | {"explained": explained[group["group"]]} for group in books.totals],
    }


def _hold(one: Judged) -> Record:
    hold = one.hold
    return {
        "worker": one.books.worker,
        # 63-bit numbers do not survive every JSON reader.
        "incarnation": str(one.books.incarnation),
        "group": hold.group,
        "kind": hold.kind,
        "key": hold.key,
        "request": hold.request,
        "attempt": hold.attempt,
        "transfer": str(hold.transfer) if hold.transfer else "",
        "peer": one.peer,
        "peer_incarnation": str(one.peer_incarnation) if one.peer_incarnation else "",
        "since_s": hold.since_s,
        "age_s": round(one.books.now_s - hold.since_s, 3),
        "blocks": list(hold.blocks),
        "verdict": one.verdict.value,
        "why": one.why,
        "is_fenced": one.verdict is HoldVerdict.SUSPECT and one.is_fenced,
    }


def _named(worker: str, hold: w.AuditHold, why: str = "") -> Record:
    record: Mapping[str, Any] = _fields_from_wire(hold)
    return {"worker": worker, **record} | ({"why": why} if why else {})


def books_from_wire(m: w.AuditReport) -> Books:
    return from_proto(
        Books,
        m,
        totals=tuple(copied(BlockCounts, counts) for counts in m.blocks),
        holds=tuple(_hold_from_wire(hold) for hold in m.holds),
        requests={request.key: from_proto(Known, request) for request in m.requests},
        sending={moving.transfer: from_proto(Moving, moving) for moving in m.sending},
        receiving={moving.transfer: from_proto(Moving, moving) for moving in m.receiving},
        claims={claim.transfer: from_proto(Claimed, claim) for claim in m.claims},
    )


def _fields_from_wire(m: w.AuditHold) -> dict[str, Any]:
    return {"group": m.group, "kind": m.kind, "key": m.key, "since_s": m.since_s, "blocks": list(m.blocks)}


def _hold_to_wire(record: Mapping[str, Any]) -> w.AuditHold:
    """Raises KeyError, TypeError, ValueError or OverflowError for a record that is no hold."""
    return w.AuditHold(
        group=int(record["group"]),
        kind=str(record["kind"]),
        key=str(record["key"]),
        since_s=float(record["since_s"]),
        blocks=[int(block) for block in record["blocks"]],
    )


def _incarnation_of(record: Mapping[str, Any]) -> int:
    """As `_hold_to_wire`."""
    return w.RepairRequest(incarnation=int(record["incarnation"])).incarnation


def _hold_from_wire(m: w.AuditHold) -> Hold:
    known = m.kind.upper() in HoldKind.__members__
    subject = subject_of(Holder(HoldKind[m.kind.upper()] if known else HoldKind.REQUEST, m.key))
    return Hold(**copied(Hold, m, subject, subject=subject.key, blocks=tuple(m.blocks)))
