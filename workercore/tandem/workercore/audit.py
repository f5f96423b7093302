"""A worker's own books for `clusterctl kv audit`, and the one repair that it allows. Runs on the step-loop thread.

A hold is released only if no byte can move for it and no part of this worker knows its purpose: the rank checks this
itself, whatever the router saw.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tandem.core.holder_keys import Subject, subject_of
from tandem.core.ids import GroupId
from tandem.core.lease_timing import LEASE_S
from tandem.core.ledger import BlockLedger, Held, Holder, HoldKind
from tandem.core.lifecycle import RoleName
from tandem.kvtransfer.snapshot import OpenTransfer
from tandem.rpc.v1 import worker_pb2 as w
from tandem.statestore.index.events import fold, member
from tandem.workercore.role import RoleContext
from tandem.workercore.transfer_claims import Claim

MAX_BLOCKS = 600_000
"""Block ids in one report: holders of one long prefix all name it, and the message has to fit the host's ring."""


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
        blocks=[_totals(ledger) for ledger in context.engine.ledgers],
        holds=list_holds(context.engine.ledgers),
        requests=[
            w.AuditRequestState(
                key=tracked.key,
                request=tracked.request,
                attempt=tracked.attempt,
                router=tracked.router,
                since_s=tracked.received_s,
                is_in_engine=tracked.key in in_engine,
            )
            for tracked in context.requests.all()
        ],
        sending=_transfers(context.sender.transfers()),
        receiving=_transfers(context.receiver.transfers()),
        claims=[
            w.AuditClaim(
                kind=claim.kind,
                key=claim.key,
                transfer=claim.transfer,
                peer=claim.peer,
                peer_incarnation=claim.peer_incarnation,
            )
            for claim in claims
        ],
        cached_blocks=len(cached),
        cached_digest=format(fold(0, cached), "x"),
    )


def list_holds(ledgers: Sequence[BlockLedger], max_blocks: int = MAX_BLOCKS) -> list[w.AuditHold]:
    """List every holder that has blocks. Where these are more than `max_blocks` in all, each names only its first, and
    cannot be repaired."""
    everyone = _everyone(ledgers)
    most = max(1, max_blocks // len(everyone)) if _are_too_many(everyone, max_blocks) else None
    return [
        w.AuditHold(
            group=group,
            kind=held.holder.kind.name.lower(),
            key=held.holder.key,
            since_s=held.since_s,
            blocks=held.blocks[:most],
        )
        for group, held in everyone
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
        return "nobody holds these blocks under this name since then"
    if sorted(held.blocks) != sorted(hold.blocks):
        if _are_too_many(_everyone(context.engine.ledgers), MAX_BLOCKS):
            return (
                f"it has {len(held.blocks)} blocks, not these {len(hold.blocks)}: so much is held here that a report "
                "names only the first of each hold, and what was not seen whole is not released; restart the worker"
            )
        return "nobody holds these blocks under this name since then"
    if context.clock.now_s() - held.since_s < LEASE_S:
        return "it is younger than a lease"
    subject = subject_of(held.holder)
    for name, transfers in (("sender", context.sender.transfers()), ("receiver", context.receiver.transfers())):
        if any(_is_about(subject, transfer) for transfer in transfers):
            return f"its transfer is open in the {name}: bytes may move"
    if context.requests.get(subject.key) is not None or subject.key in context.engine.in_flight():
        return "its request is known here"
    if any(claim.key == subject.key or claim.transfer == subject.transfer != 0 for claim in claims):
        return "the role works on it"
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


def _everyone(ledgers: Sequence[BlockLedger]) -> list[tuple[GroupId, Held]]:
    return [(ledger.group, held) for ledger in ledgers for held in ledger.held() if held.blocks]


def _are_too_many(everyone: Sequence[tuple[GroupId, Held]], max_blocks: int) -> bool:
    return sum(len(held.blocks) for _, held in everyone) > max_blocks


def _is_about(subject: Subject, transfer: OpenTransfer) -> bool:
    is_its_request = (transfer.request, transfer.attempt) == (subject.request, subject.attempt)
    return is_its_request or transfer.transfer == subject.transfer


def _totals(ledger: BlockLedger) -> w.GroupBlocksCount:
    counts = ledger.counts()
    return w.GroupBlocksCount(
        group=ledger.group,
        total=counts.total,
        free=counts.free,
        cached=counts.cached,
        request=counts.request,
        pushing=counts.pushing,
        reserved=counts.reserved,
    )


def _transfers(transfers: Iterable[OpenTransfer]) -> list[w.AuditTransfer]:
    return [
        w.AuditTransfer(
            transfer=t.transfer,
            request=t.request,
            attempt=t.attempt,
            sender=t.sender,
            sender_incarnation=t.sender_incarnation,
            receiver=t.receiver,
            receiver_incarnation=t.receiver_incarnation,
            phase=t.phase,
            age_s=t.age_s,
            bytes=t.bytes,
        )
        for t in transfers
    ]
