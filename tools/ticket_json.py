"""Tickets as JSON, for processes of tests and proofs that are driven by lines."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from tandem.core.ids import Attempt, BlockId, GroupId, Incarnation, RequestId, TransferId, WorkerId
from tandem.core.kv_layout import KVGroupSpec, KVLayout
from tandem.kvtransfer.ticket import Endpoint, GroupBlocks, Ticket


def as_json(ticket: Ticket) -> dict[str, Any]:
    """The fields from which `ticket_of` makes the same one, also after they went through JSON."""
    return asdict(ticket)


def ticket_of(fields: dict[str, Any]) -> Ticket:
    groups = tuple(
        GroupBlocks(group=GroupId(g["group"]), skip=g["skip"], blocks=tuple(map(BlockId, g["blocks"])))
        for g in fields["groups"]
    )
    specs = tuple(KVGroupSpec(**(g | {"layers": tuple(g["layers"])})) for g in fields["layout"]["groups"])
    return Ticket(
        transfer=TransferId(fields["transfer"]), request=RequestId(fields["request"]),
        attempt=Attempt(fields["attempt"]), sender=WorkerId(fields["sender"]),
        sender_incarnation=Incarnation(fields["sender_incarnation"]), receiver=WorkerId(fields["receiver"]),
        receiver_incarnation=Incarnation(fields["receiver_incarnation"]), groups=groups,
        endpoints=tuple(Endpoint(**e) for e in fields["endpoints"]),
        layout=KVLayout(groups=specs, tp=fields["layout"]["tp"]), codec=fields["codec"],
    )  # fmt: skip
