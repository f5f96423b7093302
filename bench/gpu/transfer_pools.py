"""Shared by both ends of the transfer part: pools with known content, the secret, tickets."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from tandem.core.ids import Attempt, BlockId, GroupId, Incarnation, RequestId, TransferId, WorkerId
from tandem.core.kv_layout import KVGroupSpec, KVLayout
from tandem.core.secret import ClusterSecret
from tandem.kvtransfer.ticket import Endpoint, GroupBlocks, Ticket
from tandem.worker.device_pool import DevicePool

G0 = GroupId(0)
SECRET = ClusterSecret(b"the secret of this measurement")
WORKER, SENDER, RECEIVER = WorkerId("p0"), Incarnation(1), Incarnation(2)
SPEC = KVGroupSpec(group=G0, layers=tuple(range(32)), planes=2, heads=8, width=128, block_tokens=16, dtype="bfloat16")
"""KV of an 8B model: 2 MiB a block."""


def device_pool(blocks: int, device: torch.device, *, seed: int) -> tuple[DevicePool, Tensor]:
    """A pool and its tensor, random for a seed other than 0, the same for the same one on the same kind of device."""
    shape = (blocks, len(SPEC.layers), SPEC.planes, SPEC.heads, SPEC.block_tokens, SPEC.width)
    numbers = torch.zeros(shape, dtype=torch.int16, device=device)
    if seed:
        source = torch.Generator(device).manual_seed(seed)
        numbers.random_(-(1 << 15), 1 << 15, generator=source)
    return DevicePool(SPEC, 1, numbers.view(torch.bfloat16)), numbers


def ticket(number: int, blocks: int, endpoints: tuple[Endpoint, ...]) -> Ticket:
    """A ticket for blocks 0 … `blocks` − 1, in place."""
    return Ticket(
        transfer=TransferId(number), request=RequestId("r"), attempt=Attempt(1), sender=WORKER,
        sender_incarnation=SENDER, receiver=WorkerId("d0"), receiver_incarnation=RECEIVER,
        groups=(GroupBlocks(group=G0, skip=0, blocks=tuple(map(BlockId, range(blocks)))),), endpoints=endpoints,
        layout=KVLayout(groups=(SPEC,)),
    )  # fmt: skip


def as_json(made: Ticket) -> dict[str, Any]:
    """The fields from which `ticket_of` makes the same one."""
    return {
        "number": made.transfer, "blocks": len(made.groups[0].blocks), "endpoints": [asdict(e) for e in made.endpoints],
    }  # fmt: skip


def ticket_of(fields: dict[str, Any]) -> Ticket:
    return ticket(fields["number"], fields["blocks"], tuple(Endpoint(**e) for e in fields["endpoints"]))
