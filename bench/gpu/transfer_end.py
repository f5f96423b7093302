"""The sending end of the transfer part, in a process of its own; with the pools, secret and tickets of both ends."""

from __future__ import annotations

import json
import queue
import sys
from typing import Any

import torch
from torch import Tensor

from bench.kvtransfer.children import serve
from tandem.core.clock import MonotonicClock
from tandem.core.ids import Attempt, BlockId, GroupId, Incarnation, Rank, RequestId, TransferId, WorkerId
from tandem.core.kv_layout import KVGroupSpec, KVLayout
from tandem.core.secret import ClusterSecret
from tandem.kvtransfer.sender import TransferSender
from tandem.kvtransfer.ticket import Endpoint, GroupBlocks, Ticket
from tandem.kvtransfer.transports import ipc
from tandem.worker.device_pool_io import DevicePool

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


def main() -> None:
    options: dict[str, Any] = json.loads(sys.argv[1])
    pool, _ = device_pool(options["blocks"], torch.device(options["device"]), seed=1)
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    sender = TransferSender(
        worker=WORKER, incarnation=SENDER, rank=Rank(0), pools={G0: pool}, secret=SECRET,
        preference=options["transport"], on_event=events.put, clock=MonotonicClock(),
    )  # fmt: skip
    if options["is_flipping"]:
        _flip_bits()

    def push(number: int, blocks: int, endpoints: list[dict[str, Any]]) -> dict[str, Any]:
        made = ticket(number, blocks, tuple(Endpoint(**fields) for fields in endpoints))
        (group,) = made.groups
        sender.open(made)
        sender.push(made.transfer, G0, group.blocks, group.blocks, range(len(pool.spec.layers)))
        sender.finish(made.transfer)
        return {"event": type(events.get(timeout=60)).__name__}

    print(json.dumps({"is_ready": True}), flush=True)
    serve({"push": push})
    sender.close()


def _flip_bits() -> None:
    """One bit of every payload flips in the ring, after its checksum was taken."""
    usual = ipc.IpcLink.commit_on_device

    def commit(self: ipc.IpcLink, frame: Any, room: Any) -> None:
        self._ring.staging.tensor[self._offset + len(room) // 3] ^= 1
        self._ring.memory.synchronize()
        if self._ring.memory.device.type == "cuda":
            torch.cuda.synchronize()
        usual(self, frame, room)

    ipc.IpcLink.commit_on_device = commit  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
