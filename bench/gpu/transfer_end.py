"""The sending end of the transfer part, in a process of its own: one line of JSON on stdin, answers on stdout.

Pushes the blocks of each ticket that it is sent; exits when stdin ends.
"""

from __future__ import annotations

import json
import queue
import sys
from typing import Any

import torch

from bench.gpu.transfer_pools import G0, SECRET, SENDER, WORKER, device_pool, ticket_of
from tandem.core.clock import MonotonicClock
from tandem.core.ids import Rank
from tandem.kvtransfer.sender import TransferSender
from tandem.kvtransfer.transports import ipc


def main() -> None:
    options: dict[str, Any] = json.loads(sys.stdin.readline())
    device = torch.device(options["device"])
    pool, _ = device_pool(options["blocks"], device, seed=1)
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    sender = TransferSender(
        worker=WORKER, incarnation=SENDER, rank=Rank(0), pools={G0: pool}, secret=SECRET,
        preference=options["transport"], on_event=events.put, clock=MonotonicClock(),
    )  # fmt: skip
    if options["is_flipping"]:
        _flip_bits()
    print(json.dumps({"is_ready": True}), flush=True)
    for line in sys.stdin:
        ticket = ticket_of(json.loads(line))
        (group,) = ticket.groups
        sender.open(ticket)
        sender.push(ticket.transfer, G0, group.blocks, group.blocks, range(len(pool.spec.layers)))
        sender.finish(ticket.transfer)
        print(json.dumps({"event": type(events.get(timeout=60)).__name__}), flush=True)
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
