"""The preStop hook of a worker's pod: drains the worker, and waits until it is drained."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from tandem.controlplane.worker_control import WorkerControlClient
from tandem.core.clock import Clock
from tandem.core.config import WorkerConfig
from tandem.core.config_loader import load
from tandem.core.errors import StartupError, TandemError
from tandem.core.ids import WorkerId
from tandem.core.logs import event
from tandem.core.secret import ClusterSecret

log = logging.getLogger(__name__)

HAND_BACK_S = 10.0
"""Time for a worker to hand back its running requests after its deadline."""
_LOOK_S = 0.2


async def drain(config_file: Path, deadline_s: float, clock: Clock) -> bool:
    """Drain the worker that was started with that file; True if it was drained in the end.

    Returns after `deadline_s` + 10 s at most, for then the pod ends anyway. False also for a worker that does not
    answer: it has not started yet, or has ended.
    """
    try:
        config = load(config_file, WorkerConfig)
        secret = ClusterSecret.load(Path(config.secret_file))
    except StartupError as error:
        event(log, "nothing to drain", why=error.message)
        return False
    worker, address = WorkerId(config.worker_id), f"{config.host}:{config.port}"
    control = WorkerControlClient(secret, lambda _: address)
    ends_s = clock.now_s() + deadline_s + HAND_BACK_S
    try:
        look = await control.drain(worker, deadline_s)
        while not look.is_drained and clock.now_s() < ends_s:
            await asyncio.sleep(_LOOK_S)
            look = await control.look(worker)
    except TandemError as error:
        event(log, "not drained", logging.WARNING, why=error.message)
        return False
    event(log, "drained" if look.is_drained else "cut off", in_flight=look.in_flight, leases=look.leases)
    return look.is_drained
