"""The router as a process: a real Redis, real signals, and one line of words when it cannot start."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.core.config import RouterConfig, RouterSection
from tandem.core.desired import DesiredState, Pool
from tandem.core.ids import WorkerId
from tandem.core.secret import ClusterSecret
from tandem.core.state_enums import RoleName
from tandem.statestore.connection import connect
from tandem.statestore.index.member_lease import WorkerLease
from tandem.statestore.keys import Keys
from tandem.statestore.stores.desired import DesiredStateStore
from tests.integration.router.house import ADMIN_KEY
from tests.integration.router.router_process import register_and_beat, start
from tests.integration.router.scripted_worker import Fabric, ScriptedWorker
from tools.waiting import wait_for


def failure(config: RouterConfig, folder: Path) -> str:
    with start(config, folder) as process:
        _, words = process.communicate(timeout=60)
        assert process.returncode == 2, words
    assert words.count("\n") == 1, words
    return words


def test_serves_over_redis_and_stops(config: RouterConfig, redis_url: str, tmp_path: Path) -> None:
    secret = ClusterSecret.load(Path(config.secret_file))
    with start(replace(config, redis_url=redis_url), tmp_path) as process:
        try:
            asyncio.run(_serve(config, redis_url, secret))
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()


async def _serve(config: RouterConfig, redis_url: str, secret: ClusterSecret) -> None:
    fabric = Fabric()
    roles = (RoleName.PREFILL, RoleName.DECODE)
    workers = [ScriptedWorker(WorkerId(f"{role}-0"), role, fabric, secret) for role in roles]
    redis = await connect(redis_url)
    keys = Keys(config.cluster)
    store = DesiredStateStore(redis, keys)
    pool = Pool(name="mixed", model="tiny", role=RoleName.MIXED, count=1)
    assert await store.save(DesiredState(version=1, pools=(pool,)), 0)
    async with asyncio.TaskGroup() as group:
        for worker in workers:
            await worker.start()
        beats = [group.create_task(register_and_beat(WorkerLease(redis, keys), worker)) for worker in workers]
        try:
            ready = Path(config.ready_file)
            await asyncio.to_thread(wait_for, ready.exists)
            await _use(json.loads(await asyncio.to_thread(ready.read_text)))
        finally:
            for beat in beats:
                beat.cancel()
            for worker in workers:
                await worker.stop()
    state = await store.load()
    assert state is not None
    assert state.is_stopped
    await redis.aclose()


async def _use(places: dict[str, Any]) -> None:
    url, admin = places["http"], places["admin"]
    async with httpx.AsyncClient() as client:
        async with asyncio.timeout(60):
            while (await client.get(f"{url}/readyz")).status_code != 200:
                await asyncio.sleep(0.1)
        answer = await client.post(f"{url}/v1/completions", json={"model": "tiny", "prompt": "Hi"})
        assert answer.status_code == 200
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        status = (await client.get(f"{admin}/admin/v1/status", headers=headers)).json()
        assert len(status["workers"]) == 2
        assert (await client.post(f"{admin}/admin/v1/down", headers=headers)).status_code == 202


@pytest.mark.parametrize("which", ["port", "grpc_port", "admin_port"])
def test_port_taken(config: RouterConfig, redis_url: str, tmp_path: Path, which: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ports: dict[str, Any] = {"port": 0, "grpc_port": 0, "admin_port": 0, which: port}
        words = failure(replace(config, redis_url=redis_url, settings=RouterSection(**ports)), tmp_path)
    assert f"cannot listen on 127.0.0.1:{port}" in words
    assert "Choose another port" in words


def test_cannot_start(config: RouterConfig, redis_url: str, tmp_path: Path) -> None:
    assert "cannot reach Redis" in failure(config, tmp_path)
    here = replace(config, redis_url=redis_url)
    gone = (replace(config.models[0], model_dir=str(tmp_path / "none")),)
    assert "tokenizer.json" in failure(replace(here, models=gone), tmp_path)
    lost = (replace(config.models[0], chat_template=str(tmp_path / "none")),)
    assert "chat template" in failure(replace(here, models=lost), tmp_path)
    assert "cluster secret" in failure(replace(here, secret_file=str(tmp_path / "none")), tmp_path)
    assert "admin key" in failure(replace(here, admin_key_file=str(tmp_path / "none")), tmp_path)


def test_no_torch_in_the_router() -> None:
    heavy = ("torch", "transformers", "numpy")
    code = f"import sys, tandem.router.server.main; print([m for m in sys.modules if m.split('.')[0] in {heavy}])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=True)
    assert answer.stdout.strip() == "[]"
