"""A worker's own books for `clusterctl kv audit`, and the one repair that it allows. Runs on the step-loop thread.

A hold is released only if no byte can move for it and no part of this worker knows its purpose: the rank checks this
itself, whatever the router saw.
"""

from __future__ import annotations

from collections.abc import Sequence

from tandem.core.ids import GroupId
from tandem.core.lease_timing import LEASE_S
from tandem.core.ledger import BlockLedger, Held, Holder, HoldKind, Subject, subject_of
from tandem.core.proto_mapping import to_proto
from tandem.core.state_enums import RoleName
from tandem.kvtransfer.state import OpenTransfer
from tandem.rpc.v1 import worker_pb2 as w
from tandem.statestore.index.events import fold, member
from tandem.workercore.role_interface import Claim, RoleContext

MAX_BLOCKS = 600_000
"""Block ids in one report: holders of one long prefix all name it, and the message has to fit the host's ring."""
_CHANGED = "no holder of this name has had these blocks since then"


def report(context: RoleContext, role: RoleName, claims: Sequence[Claim], number: int) -> w.AuditReport:
    """Report all holds, and everything that could explain them. `number` is the query's id."""
    in_engine = frozenset(context.engine.in_flight())
    cached = [member(ledger.group, block) for ledger in context.engine.ledgers for block in ledger.hashes()]
    return w.AuditReport(
        id=number,
        worker=context.worker,
        incarnation=context.incarnation,
        role=role.value,
        now_s=context.clock.now_s(),
        blocks=[to_proto(w.GroupBlocksCount, ledger.counts(), group=ledger.group) for ledger in context.engine.ledgers],
        holds=list_holds(context.engine.ledgers),
        requests=[
            to_proto(
                w.AuditRequestState,
                tracked,
                key=tracked.key,
                since_s=tracked.received_s,
                is_in_engine=tracked.key in in_engine,
            )
            for tracked in context.requests.all()
        ],
        sending=list(map(_transfer, context.sender.transfers())),
        receiving=list(map(_transfer, context.receiver.transfers())),
        claims=[to_proto(w.AuditClaim, claim) for claim in claims],
        cached_blocks=len(cached),
        cached_digest=format(fold(0, cached), "x"),
    )


def list_holds(ledgers: Sequence[BlockLedger], max_blocks: int = MAX_BLOCKS) -> list[w.AuditHold]:
    """List every holder that has blocks. Where these are more than `max_blocks` in all, each names only its first, and
    cannot be repaired."""
    holds = _holds(ledgers)
    most = max(1, max_blocks // len(holds)) if _are_too_many(holds, max_blocks) else None
    return [
        w.AuditHold(
            group=group,
            kind=held.holder.kind.name.lower(),
            key=held.holder.key,
            since_s=held.since_s,
            blocks=held.blocks[:most],
        )
        for group, held in holds
    ]


def repair(context: RoleContext, role: RoleName, claims: Sequence[Claim], message: w.RepairRequest) -> w.AuditReport:
    """Release what is provably fenced of the holds named; the report afterwards names those released, and why the rest
    were not."""
    released: list[w.AuditHold] = []
    refused: list[w.RepairRefusal] = []
    for hold in message.holds:
        why = _refusal(context, claims, message.incarnation, hold)
        if why:
            refused.append(w.RepairRefusal(hold=hold, why=why))
            continue
        context.engine.ledgers[hold.group].release(Holder(HoldKind[hold.kind.upper()], hold.key))
        context.count("blocks_repaired", len(hold.blocks))
        released.append(hold)
    answer = report(context, role, claims, message.id)
    answer.released.extend(released)
    answer.refused.extend(refused)
    return answer


def _refusal(context: RoleContext, claims: Sequence[Claim], incarnation: int, hold: w.AuditHold) -> str:
    """Reason why a hold is not released, or ""."""
    if incarnation != context.incarnation:
        return f"this worker is now {context.incarnation}"
    held = _find(context, hold)
    if held is None:
        return _CHANGED
    if sorted(held.blocks) != sorted(hold.blocks):
        if _are_too_many(_holds(context.engine.ledgers), MAX_BLOCKS):
            return (
                f"it has {len(held.blocks)} blocks, not these {len(hold.blocks)}: so much is held here that a report "
                "names only the first of each hold, and what was not seen whole is not released; restart the worker"
            )
        return _CHANGED
    if context.clock.now_s() - held.since_s < LEASE_S:
        return "it is younger than a lease"
    subject = subject_of(held.holder)
    for name, transfers in (("sender", context.sender.transfers()), ("receiver", context.receiver.transfers())):
        if any(_is_about(subject, transfer) for transfer in transfers):
            return f"its transfer is open in the {name}: bytes may move"
    if context.requests.get(subject.key) is not None or subject.key in context.engine.in_flight():
        return "its request is known here"
    if any(claim.key == subject.key or claim.transfer == subject.transfer != 0 for claim in claims):
        return "its role is working on it"
    return ""


def _find(context: RoleContext, hold: w.AuditHold) -> Held | None:
    """The holder's hold, if it began at the same moment; its blocks may be others."""
    if hold.group >= len(context.engine.ledgers) or hold.kind.upper() not in HoldKind.__members__:
        return None
    wanted = Holder(HoldKind[hold.kind.upper()], hold.key)
    for held in context.engine.ledgers[hold.group].held():
        if held.holder == wanted:
            return held if held.since_s == hold.since_s else None
    return None


def _holds(ledgers: Sequence[BlockLedger]) -> list[tuple[GroupId, Held]]:
    return [(ledger.group, held) for ledger in ledgers for held in ledger.held() if held.blocks]


def _are_too_many(holds: Sequence[tuple[GroupId, Held]], max_blocks: int) -> bool:
    return sum(len(held.blocks) for _, held in holds) > max_blocks


def _is_about(subject: Subject, transfer: OpenTransfer) -> bool:
    is_its_request = (transfer.ticket.request, transfer.ticket.attempt) == (subject.request, subject.attempt)
    return is_its_request or transfer.transfer == subject.transfer


def _transfer(transfer: OpenTransfer) -> w.AuditTransfer:
    return to_proto(w.AuditTransfer, transfer.ticket, phase=transfer.phase, age_s=transfer.age_s, bytes=transfer.bytes)
