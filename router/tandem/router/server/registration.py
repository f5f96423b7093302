"""A router's records: its lease in Redis, the file for its launcher, and the wish that the whole cluster ends."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tandem.core import config_loader, logs
from tandem.core.background_loop import LoopWatch
from tandem.core.errors import ConfigError, TandemError, UnavailableError
from tandem.core.files import write_private
from tandem.core.lease_timing import BEAT_S
from tandem.core.logs import event
from tandem.statestore.connection import open_client
from tandem.statestore.index.member_lease import RouterLease
from tandem.statestore.keys import Keys
from tandem.statestore.records import RouterRecord
from tandem.statestore.stores.desired import DesiredStateStore

_log = logging.getLogger(__name__)
_TRIES = 20


async def hold_lease(url: str, keys: Keys, record: RouterRecord, watch: LoopWatch) -> None:
    """Register and beat until cancelled; an outage is waited out, a lapse ends in a new registration.

    For a loop beside the one that `watch` watches: the lease goes on while that one stands, until it is given up.
    """
    redis = open_client(url)
    try:
        await _beat(RouterLease(redis, keys), record, watch)
    finally:
        await redis.aclose()


async def _beat(lease: RouterLease, record: RouterRecord, watch: LoopWatch) -> None:
    is_held = False
    try:
        while True:
            try:
                if not watch.is_given_up:
                    if not is_held:
                        await lease.register(record)
                    is_held = await lease.beat()
            except UnavailableError as error:
                event(_log, "no lease", logging.WARNING, why=error.message)
            await asyncio.sleep(BEAT_S)
    finally:
        try:
            async with asyncio.timeout(1.0):
                await lease.deregister()
        except (TandemError, TimeoutError, RuntimeError):
            event(_log, "could not deregister", logging.WARNING)


async def ask_to_stop(store: DesiredStateStore) -> None:
    """Write the wish that the whole cluster ends; raises ConfigError when there is no desired state."""
    for _ in range(_TRIES):
        state = await store.load()
        if state is None:
            raise ConfigError("this cluster has no desired state", todo="stop the processes that were started")
        if state.is_stopped:
            return
        if await store.save(replace(state, version=state.version + 1, is_stopped=True), state.version):
            return
    raise UnavailableError("the desired state keeps changing", todo="try again")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The file that a router writes for its launcher once its sockets listen: URLs of the API and the admin port,
    host:port of gRPC, process id. `is_open`: requests without an API key are let in."""

    http: str
    grpc: str
    admin: str
    pid: int
    is_open: bool


def write_ready(path: Path, ready: Ready) -> None:
    """Write it, all at once."""
    write_private(path, config_loader.dump(ready))
    logs.event(_log, "listening", **asdict(ready))
