"""A process of a router that dies soon after every start is started ever later, like workers and whole routers."""

import asyncio
from pathlib import Path

import pytest

from tandem.core.clock import ManualClock
from tandem.core.config import RouterConfig
from tandem.router.admin.multiprocess_admin import ReplicatedSettings
from tandem.router.server.multiprocess import Process
from tandem.router.server.registration import Ready

READY = Ready(http="http://h:1", grpc="h:2", admin="http://h:3", pid=1, is_open=True)
STARTS = 4


class ShortLived(Process):
    """Starts well, dies at once; its last start cannot write its configuration."""

    starts = 0

    async def start(self) -> None:
        self.starts += 1
        if self.starts == STARTS:
            raise OSError(28, "No space left on device")
        await self._join(READY)

    async def ended(self) -> int:
        return 1


def test_it_waits_longer_every_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "key").write_text("an-admin-key-nobody-guesses")
    config = RouterConfig(
        cluster="c", router_id="r", models=(), redis_url="", secret_file="", admin_key_file=str(tmp_path / "key"),
        ready_file=str(tmp_path / "ready.json"),
    )  # fmt: skip
    delays_s: list[float] = []
    pause = asyncio.sleep

    async def skip(seconds: float) -> None:
        delays_s.append(seconds)
        if len(delays_s) > STARTS:
            raise asyncio.CancelledError
        await pause(0)

    monkeypatch.setattr(asyncio, "sleep", skip)
    process = ShortLived(config, 0, ReplicatedSettings(), ManualClock())
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(process.keep())
    assert process.starts == STARTS
    assert delays_s == [0.5, 1.0, 2.0, 4.0, 8.0]
