"""A rank process: engine, pools, transfer ends and role, driven by one step loop. Started by the worker's host."""

from __future__ import annotations

import argparse
import gc
import os
import sys
import threading
from pathlib import Path

from tandem.core.clock import MonotonicClock
from tandem.core.config import WorkerConfig
from tandem.core.config_loader import load
from tandem.core.errors import TandemError
from tandem.core.ids import WorkerId
from tandem.core.lifecycle import RoleName
from tandem.core.logs import setup
from tandem.core.parentdeath import die_with_parent
from tandem.rpc.v1 import engine_pb2 as e
from tandem.rpc.v1 import worker_pb2 as w
from tandem.workerhost.inbox import Inbox
from tandem.workerhost.outbox import Outbox
from tandem.workerhost.pulse import Pulse
from tandem.workerhost.requests import RequestTable
from tandem.workerhost.ring import RingHandle, RingReader, RingWriter
from tandem.workerhost.role import Role, Shell
from tandem.workerhost.steploop import StepLoop
from tandem.workerhost.wire import PROTOCOL, endpoint_to_wire

TICK_EVERY_S = 0.2
HOST_TIMEOUT_S = 10.0
TOMBSTONE_S = 5.0
SWITCH_INTERVAL_S = 0.0005
"""Transfer threads hand over to the step loop, and back, sooner than with Python's 5 ms."""


def main() -> int:
    arguments = _arguments()
    die_with_parent(arguments.parent)
    config = load(Path(arguments.config), WorkerConfig)
    setup(f"{config.worker_id}/rank{arguments.rank}", level=config.log_level)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    writer = RingWriter(RingHandle.parse(arguments.outbox))
    inbox = Inbox.open(RingReader(RingHandle.parse(arguments.inbox)))
    pulse = Pulse(arguments.pulse)
    outbox = Outbox(lambda data: writer.write(data, HOST_TIMEOUT_S))
    threading.Thread(target=_tick, args=(pulse,), name="tick", daemon=True).start()
    try:
        shell, info = assemble(config, inbox, outbox)
        role = create_role(config.role, shell)
    except TandemError as error:
        outbox.put(e.RankToHost(fatal=e.Fatal(code=error.code, message=error.message)))
        return 2
    gc.collect()
    gc.freeze()  # what was loaded stays; collections during steps need not look at it
    endpoints = [endpoint_to_wire(endpoint) for endpoint in shell.receiver.endpoints()]
    outbox.put(e.RankToHost(ready=e.RankReady(info=info, endpoints=endpoints)))
    try:
        StepLoop(shell, role, inbox, pulse).run()
    finally:
        shell.sender.close()
        shell.receiver.close()
    return 0


def create_role(name: RoleName, shell: Shell) -> Role:
    """The role object for a role's name; its package is imported only when it is asked for."""
    if name is RoleName.PREFILL:
        from tandem.prefill_worker.role import PrefillRole

        return PrefillRole(shell)
    if name is RoleName.DECODE:
        from tandem.decode_worker.role import DecodeRole

        return DecodeRole(shell)
    from tandem.worker.mixed_role import MixedRole

    return MixedRole(shell)


def assemble(config: WorkerConfig, inbox: Inbox, outbox: Outbox) -> tuple[Shell, w.WorkerInfo]:
    """Load the model, build engine and transfer ends, warm up. Raises TandemError with what to do about it."""

    def progress(text: str) -> None:
        outbox.put(e.RankToHost(progress=e.Progress(text=text)))

    progress("importing torch")
    from tandem.kvtransfer.hostid import host_id
    from tandem.worker.loading import NOT_REGISTERED, load_engine, open_transfer_ends

    progress("loading the model")
    loaded = load_engine(config)
    progress("warming up")
    loaded.warm_up()
    receiver, sender = open_transfer_ends(config, loaded, inbox.post)
    shell = Shell(
        worker=WorkerId(config.worker_id),
        incarnation=NOT_REGISTERED,
        fingerprint=loaded.fingerprint,
        host=host_id(),
        engine=loaded.engine,
        receiver=receiver,
        sender=sender,
        requests=RequestTable(TOMBSTONE_S),
        outbox=outbox,
        clock=MonotonicClock(),
    )
    return shell, _info(config, shell)


def _info(config: WorkerConfig, shell: Shell) -> w.WorkerInfo:
    engine, first = shell.engine, shell.engine.layout.groups[0]
    return w.WorkerInfo(
        worker=config.worker_id,
        role=config.role.value,
        model=config.model,
        fingerprint=shell.fingerprint,
        tp=engine.layout.tp,
        block_tokens=first.block_tokens,
        kv_dtype=first.dtype,
        max_model_len=engine.max_model_len,
        vocab_size=engine.vocab_size,
        num_blocks=[ledger.num_blocks for ledger in engine.ledgers],
        token_kv_bytes=engine.layout.token_bytes(),
        transports=sorted({endpoint.transport for endpoint in shell.receiver.endpoints()}),
        protocol=PROTOCOL,
        eos_token_ids=engine.eos_token_ids,
        pid=os.getppid(),
    )


def _tick(pulse: Pulse) -> None:
    """Show that the process runs, also during long steps."""
    clock, pause = MonotonicClock(), threading.Event()
    while True:
        pulse.tick(clock.now_s())
        pause.wait(TICK_EVERY_S)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--inbox", required=True)
    parser.add_argument("--outbox", required=True)
    parser.add_argument("--pulse", type=int, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
