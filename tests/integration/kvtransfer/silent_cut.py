"""Run in a network namespace of its own: both ends over loopback, which then goes down and swallows every packet."""

import json
import queue
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.integration.kvtransfer.rig import Rig

LIMIT_S = 8.0
"""Well above the 3 s in which a cut has to be noticed, well below what the transports' defaults would take."""


def main() -> None:
    transport, state, folder = sys.argv[1:]
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    rig = Rig(transport, Path(folder))
    source, target = rig.side(seed=1), rig.side()
    receiver, sender = rig.receiver(target), rig.sender(source)
    ticket = rig.ticket(receiver.endpoints(), {0: range(64)})
    receiver.expect(ticket)
    sender.open(ticket)
    (blocks,) = ticket.groups
    pool = target.pools[blocks.group]
    if state == "pushing":
        pool.write_gate.clear()
    sender.push(ticket.transfer, blocks.group, blocks.blocks[:8], blocks.blocks[:8], range(4))
    if not pool.writing.wait(LIMIT_S):
        raise SystemExit("the push did not begin")
    subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
    cut_s = time.monotonic()
    pool.write_gate.set()
    said = {"sender": outcome(source), "receiver": outcome(target)}
    print(f"noticed after {time.monotonic() - cut_s:.1f} s", file=sys.stderr)
    print(json.dumps(said), flush=True)
    rig.close()


def outcome(side: Any) -> str:
    try:
        return type(side.events.get(timeout=LIMIT_S)).__name__
    except queue.Empty:
        return "nothing"


if __name__ == "__main__":
    main()
