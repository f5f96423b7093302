"""A router in a process of its own, as tests start it."""

import asyncio
import subprocess
import sys
from pathlib import Path

import msgspec

from tandem.core.config import RouterConfig
from tandem.statestore.index.member_lease import WorkerLease
from tests.integration.router.scripted_worker import ScriptedWorker
from tools.running_cluster import is_alive

PATIENCE_S = 60.0
"""Starting some processes takes long where many others run."""


def start(config: RouterConfig, folder: Path) -> subprocess.Popen[str]:
    path = folder / "router.json"
    path.write_bytes(msgspec.json.encode(config))
    command = [sys.executable, "-m", "tandem.router", "--config", str(path)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


async def register_and_beat(lease: WorkerLease, worker: ScriptedWorker) -> None:
    record = worker.facts.record()
    await lease.register(record)
    while True:
        if not await lease.beat(0, 0, 0):
            await lease.register(record)
        await asyncio.sleep(0.2)


def is_gone(pid: int) -> bool:
    """True if it runs no more, and its sockets are closed; its parent need not have noticed."""
    return not is_alive(pid)
