"""Audit messages between protobuf and the router's own records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tandem.core.holder_keys import subject_of
from tandem.core.ledger import Holder, HoldKind
from tandem.router.admin.audit_join import Books, Claimed, Hold, Known, Moving
from tandem.rpc.v1 import worker_pb2 as w


def books_from_wire(m: w.AuditReport) -> Books:
    return Books(
        worker=m.worker,
        incarnation=m.incarnation,
        role=m.role,
        now_s=m.now_s,
        totals=tuple(
            {
                "group": b.group,
                "total": b.total,
                "free": b.free,
                "cached": b.cached,
                "request": b.request,
                "pushing": b.pushing,
                "reserved": b.reserved,
            }
            for b in m.blocks
        ),
        holds=tuple(_hold(hold) for hold in m.holds),
        requests={
            r.key: Known(request=r.request, attempt=r.attempt, router=r.router, is_in_engine=r.is_in_engine)
            for r in m.requests
        },
        sending=_moving(m.sending),
        receiving=_moving(m.receiving),
        claims={
            c.transfer: Claimed(
                kind=c.kind, key=c.key, transfer=c.transfer, peer=c.peer, peer_incarnation=c.peer_incarnation
            )
            for c in m.claims
        },
        cached_blocks=m.cached_blocks,
        cached_digest=m.cached_digest,
    )


def from_wire(m: w.AuditHold) -> dict[str, Any]:
    return {"group": m.group, "kind": m.kind, "key": m.key, "since_s": m.since_s, "blocks": list(m.blocks)}


def to_wire(record: Mapping[str, Any]) -> w.AuditHold:
    """Raises KeyError, TypeError, ValueError or OverflowError for a record that is no hold."""
    return w.AuditHold(
        group=int(record["group"]),
        kind=str(record["kind"]),
        key=str(record["key"]),
        since_s=float(record["since_s"]),
        blocks=[int(block) for block in record["blocks"]],
    )


def incarnation_of(record: Mapping[str, Any]) -> int:
    """As `to_wire`."""
    return w.RepairRequest(incarnation=int(record["incarnation"])).incarnation


def _hold(m: w.AuditHold) -> Hold:
    known = m.kind.upper() in HoldKind.__members__
    subject = subject_of(Holder(HoldKind[m.kind.upper()] if known else HoldKind.REQUEST, m.key))
    return Hold(
        group=m.group,
        kind=m.kind,
        key=m.key,
        subject=subject.key,
        request=subject.request,
        attempt=subject.attempt,
        transfer=subject.transfer,
        since_s=m.since_s,
        blocks=tuple(m.blocks),
    )


def _moving(transfers: Iterable[w.AuditTransfer]) -> dict[int, Moving]:
    return {
        t.transfer: Moving(
            transfer=t.transfer,
            request=t.request,
            attempt=t.attempt,
            sender=t.sender,
            sender_incarnation=t.sender_incarnation,
            receiver=t.receiver,
            receiver_incarnation=t.receiver_incarnation,
            phase=t.phase,
            age_s=t.age_s,
        )
        for t in transfers
    }
