"""The cluster's private Redis under supervision: no other task waits while it is restarted."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.controlplane.redis_server import open_redis
from tandem.controlplane.state_dir import HeldState
from tandem.core.config import RedisSection
from tandem.statestore.connection import connect

HANGING = "#!/bin/sh\nexec sleep 600\n"


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def test_nobody_waits_while_it_is_started_again(
    held: HeldState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first successor sends nothing. That one is killed as well, and the next is whole."""
    hanging, path = tmp_path / "bin" / "redis-server", os.environ["PATH"]
    hanging.parent.mkdir()
    hanging.write_text(HANGING)
    hanging.chmod(0o755)
    told: list[str] = []

    async def watch() -> None:
        keeping = asyncio.create_task(redis.keep(told.append))
        monkeypatch.setenv("PATH", str(hanging.parent), prepend=os.pathsep)
        _kill(redis.pid)
        await until(lambda: told)
        for _ in range(20):
            await asyncio.sleep(0)
        assert told == ["it died, starting it again"], "and it still says nothing, while others go on"
        monkeypatch.setenv("PATH", path)
        _kill(redis.pid)
        await until(lambda: len(told) > 3)
        assert told[1].startswith("Redis ended at once")
        assert told[2:] == ["it died, starting it again", f"answers again, process {redis.pid}"]
        client = await connect(redis.url)
        await client.aclose()
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)

    with open_redis(RedisSection(memory_bytes=1 << 30), held.state, held.draw_secrets(), told.append) as redis:
        asyncio.run(watch())


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
