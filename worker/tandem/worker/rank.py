"""A rank process, started by the worker's host. Rank 0 runs engine and role in one step loop; the others follow it."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable
from pathlib import Path

from tandem.core.config import WorkerConfig
from tandem.core.config_loader import load
from tandem.core.errors import InternalError, TandemError
from tandem.core.ids import Rank
from tandem.core.logs import JSON, setup
from tandem.core.memory import freeze_gc, load_without_pauses
from tandem.core.parent_death_signal import die_with_parent
from tandem.core.proto_mapping import to_proto
from tandem.core.state_enums import RoleName
from tandem.core.timeout_scale import patient
from tandem.kernels.cpu_memory import keep_freed_memory
from tandem.rpc.v1 import engine_pb2 as e
from tandem.rpc.v1 import worker_pb2 as w
from tandem.worker.builder import RankIdentity, assemble_follower, assemble_leader
from tandem.workercore.heartbeat import Pulse, Ticker
from tandem.workercore.inbox import Inbox
from tandem.workercore.message_ring import RingHandle, RingPair, RingReader, RingWriter
from tandem.workercore.mixed_role import MixedRole
from tandem.workercore.outbox import Outbox
from tandem.workercore.role_interface import Role, RoleContext
from tandem.workercore.step_loop import StepLoop

_log = logging.getLogger(__name__)
HOST_TIMEOUT_S = patient(10.0)
SWITCH_INTERVAL_S = 0.0005
"""Transfer threads and the step loop switch sooner than with Python's 5 ms."""
EXIT_STARTUP = 2
EXIT_LOST = 1


def main() -> int:
    arguments = _arguments()
    die_with_parent(arguments.parent)
    load_without_pauses()
    config = load(Path(arguments.config), WorkerConfig)
    setup(f"{config.worker_id}/rank{arguments.rank}", level=config.log_level, as_json=config.log_format == JSON)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    keep_freed_memory()
    writer = RingWriter(RingHandle.parse(arguments.outbox))
    outbox = Outbox(lambda data: writer.write(data, HOST_TIMEOUT_S))
    pulse = Pulse(arguments.pulse)
    ticker = Ticker(pulse)
    ticker.start()
    pairs = tuple(RingPair.parse(text) for text in arguments.pair)
    seat = RankIdentity(Rank(arguments.rank), pairs, Path(arguments.rendezvous))
    try:
        if seat.rank == 0:
            inbox = Inbox.open(RingReader(RingHandle.parse(arguments.inbox)))
            run, close = _lead(config, seat, inbox, outbox, pulse, ticker)
        else:
            run, close = _follow(config, seat, pulse, ticker)
    except Exception as error:  # noqa: BLE001 - the top of the rank, before it is ready: the same holds
        if not isinstance(error, TandemError):
            _log.exception("rank does not start")
        _tell_fatal(outbox, error)
        return EXIT_STARTUP
    freeze_gc()
    try:
        run()
    except Exception as error:  # noqa: BLE001 - the top of the rank: the host gets the reason and ends the worker
        _log.exception("rank ends")
        _tell_fatal(outbox, error)
        return EXIT_LOST
    close()
    return 0


def create_role(name: RoleName, context: RoleContext) -> Role:
    """Return the role object of this name; its package is imported only then."""
    if name is RoleName.PREFILL:
        from tandem.prefill_worker.role import PrefillRole

        return PrefillRole(context)
    if name is RoleName.DECODE:
        from tandem.decode_worker.role import DecodeRole

        return DecodeRole(context)
    return MixedRole(context)


Part = tuple[Callable[[], None], Callable[[], None]]
"""(run until stopped, close)"""


def _lead(config: WorkerConfig, seat: RankIdentity, inbox: Inbox, outbox: Outbox, pulse: Pulse, ticker: Ticker) -> Part:
    leader = assemble_leader(config, seat, inbox, outbox)
    ticker.count_batch = leader.context.engine.batch_counts
    loop = StepLoop(leader.context, create_role(config.role, leader.context), inbox, pulse, create_role)
    endpoints = [to_proto(w.RankEndpoint, endpoint) for endpoint in leader.context.receiver.endpoints()]
    outbox.put(e.RankToHost(ready=e.RankReady(info=leader.info, endpoints=endpoints)))
    return loop.run, leader.close


def _follow(config: WorkerConfig, seat: RankIdentity, pulse: Pulse, ticker: Ticker) -> Part:
    follower = assemble_follower(config, seat, pulse)
    ticker.count_batch = follower.batch_counts
    return follower.run, follower.close


def _tell_fatal(outbox: Outbox, error: Exception) -> None:
    if not isinstance(error, TandemError):
        error = InternalError("a rank failed", why=f"{type(error).__name__}: {error}")
    outbox.put(e.RankToHost(fatal=e.Fatal(code=error.code, message=error.message)))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--inbox", required=True)
    parser.add_argument("--outbox", required=True)
    parser.add_argument("--pulse", type=int, required=True)
    parser.add_argument("--pair", action="append", default=[], help="rings between rank 0 and a follower")
    parser.add_argument("--rendezvous", default="", help="a new file in which the ranks of this worker meet")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
