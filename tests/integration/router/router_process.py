"""A router in a process of its own, as tests start it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import msgspec

from tandem.core.config import RouterConfig
from tandem.prefixindex.lease import WorkerLease
from tests.integration.router.scripted_worker import ScriptedWorker

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
    """It runs no more; its parent need not have noticed."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
