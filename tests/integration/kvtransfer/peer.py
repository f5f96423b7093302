"""One end of transfers in a process of its own, driven by JSON lines on stdin; events leave as JSON lines."""

import hashlib
import itertools
import json
import random
import sys
import threading
from pathlib import Path
from typing import Any

from tandem.core.clock import MonotonicClock
from tandem.core.ids import GroupId, Incarnation, Rank, WorkerId
from tandem.core.kv_layout import KVGroupSpec
from tandem.core.secret import ClusterSecret
from tandem.kvtransfer.kv_pool_access import HostPool
from tandem.kvtransfer.receiver import TransferReceiver
from tandem.kvtransfer.sender import TransferSender
from tools.ticket_json import ticket_of

SECRET = ClusterSecret(b"the secret of these tests")
_output = threading.Lock()


def main() -> None:
    role, options = sys.argv[1], json.loads(sys.argv[2])
    spec = KVGroupSpec(**(options["spec"] | {"layers": tuple(options["spec"]["layers"])}))
    size = options["num_blocks"] * spec.block_bytes()
    memory: Any = bytearray(random.Random(options["seed"]).randbytes(size) if options["seed"] else size)
    pool: Any = SlowPool(spec, 1, memoryview(memory))
    device = {"cpu_ipc": "cpu", "cuda_ipc": "cuda"}.get(options["transport"])
    if device:
        from tests.integration.kvtransfer.tensorpools import DeviceBytes, SlowDevicePool

        memory = DeviceBytes(memory, device)
        pool = SlowDevicePool(spec, 1, memory, say)
    pool.halts_at = 0 if options.get("hangs") else options.get("halts_at", -1)
    if role == "receiver":
        receive(options, pool, memory)
    else:
        send(options, pool)


class SlowPool(HostPool):
    """Reports every write; the copy of number `halts_at` (reads and writes counted together) waits for the gate."""

    def __init__(self, spec: KVGroupSpec, tp: int, data: memoryview) -> None:
        super().__init__(spec, tp, data)
        self.gate = threading.Event()
        self.halts_at = -1
        self._copies = itertools.count()

    def read_into(self, *args: Any) -> int:
        self._halt()
        return super().read_into(*args)

    def write_from(self, *args: Any) -> int:
        say("writing")
        self._halt()
        return super().write_from(*args)

    def _halt(self) -> None:
        if next(self._copies) == self.halts_at:
            say("halted")
            self.gate.wait()


def receive(options: dict[str, Any], pool: Any, memory: Any) -> None:
    receiver = TransferReceiver(
        incarnation=Incarnation(22), rank=Rank(0), pools={GroupId(0): pool}, secret=SECRET,
        runtime_dir=Path(options["runtime_dir"]), transports=(options["transport"],),
        on_event=lambda e: say(type(e).__name__, transfer=e.transfer, reason=getattr(e, "reason", "")),
        clock=MonotonicClock(),
    )  # fmt: skip
    receiver.start()
    fields = ("rank", "transport", "host", "address")
    say("ready", endpoints=[{f: getattr(e, f) for f in fields} for e in receiver.endpoints()])
    for command in commands():
        if command["command"] == "expect":
            receiver.expect(ticket_of(command["ticket"]))
            say("expected")
        elif command["command"] == "digest":
            say("digest", digest=hashlib.sha256(bytes(memory)).hexdigest(), counters=receiver.counters())
        elif command["command"] == "go":
            pool.gate.set()
    receiver.close()


def send(options: dict[str, Any], pool: Any) -> None:
    sender = TransferSender(
        worker=WorkerId("p0"), incarnation=Incarnation(11), rank=Rank(0), pools={GroupId(0): pool}, secret=SECRET,
        preference=options["transport"], clock=MonotonicClock(),
        on_event=lambda e: say(type(e).__name__, transfer=e.transfer, reason=getattr(e, "reason", "")),
    )  # fmt: skip
    say("ready")
    for command in commands():
        if command["command"] == "go":
            pool.gate.set()
            continue
        ticket = ticket_of(command["ticket"])
        blocks = ticket.groups[0].blocks
        sender.open(ticket)
        if command["command"] == "open":
            say("opened")
            continue
        sender.push(ticket.transfer, GroupId(0), blocks, blocks, range(len(pool.spec.layers)))
        if command["command"] == "push":
            sender.finish(ticket.transfer)
    sender.close()


def commands() -> Any:
    for line in sys.stdin:
        yield json.loads(line)


def say(event: str, **fields: Any) -> None:
    with _output:
        print(json.dumps({"event": event} | fields), flush=True)


if __name__ == "__main__":
    main()
