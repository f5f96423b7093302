"""A step that does not end takes the worker out of rotation until it does; its ranks report their activity
meanwhile."""

import asyncio
import re
import signal
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.core import metric_names as names
from tandem.core.config import SimSection, WorkerConfig, WorkerSection
from tandem.core.config_loader import dump
from tandem.core.errors import WorkerLostError
from tandem.core.secret import ClusterSecret
from tandem.core.state_enums import RoleName, WorkerState
from tandem.rpc.v1 import worker_pb2 as w
from tandem.statestore.embedded_redis import PrivateRedis
from tandem.workerhost import rank_group
from tandem.workerhost.host import LIVE, READY, WorkerHost
from tests.integration.worker import seized_rank
from tests.integration.worker.alone import last_words, worker_of
from tests.integration.worker.pair import MODEL, RunningWorker, submit
from tools.waiting import wait_for_async

PROMPT = [4001 + i for i in range(40)]
HANGING = SimSection(prefill_tokens_per_s=10.0)
"""The prompt is one step of four seconds."""
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


async def asked(worker: RunningWorker, service: str) -> Any:
    """Return the answer to a readiness probe."""
    async with grpc.aio.insecure_channel(worker.ready["address"]) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        return (await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=30.0)).status


async def until_finished(worker: RunningWorker) -> list[str]:
    """Return the states that the worker sent to its router, until its request ended."""
    states = []
    async with asyncio.timeout(60):
        while True:
            message = await worker.messages.get()
            if message.HasField("state"):
                states.append(message.state.state)
            if any(chunk.finish for chunk in message.tokens.chunks):
                return states


@pytest.mark.parametrize("tp", [1, 2])
async def test_a_slow_step_turns_readiness_off_and_its_end_turns_it_on_again(folder: Path, tp: int) -> None:
    async with worker_of(folder, tp, engine="sim", sim=HANGING, step_slow_s=1.0) as worker:

        async def is_(status: int) -> bool:
            return bool(await asked(worker, READY) == status)

        assert await is_(SERVING)
        await worker.send(submit=submit("r", w.LEG_FULL, worker, PROMPT, max_tokens=2, ignore_eos=True))
        await wait_for_async(lambda: is_(NOT_SERVING))
        assert await asked(worker, LIVE) == SERVING
        states = await until_finished(worker)
        await wait_for_async(lambda: is_(SERVING))
        await wait_for_async(lambda: worker.load.counters[names.STEP_STALLS] == 1.0)
        worker.process.send_signal(signal.SIGTERM)
        states, load = states, worker.load
    assert states[0] == WorkerState.STALLED
    assert load.counters[names.STEP_STALLS] == 1.0
    log = (folder / "m0.log").read_text()
    for rank in range(tp):
        (said,) = [line for line in log.splitlines() if f"m0/rank{rank} stacks of all threads" in line]
        assert "decodes=0 chunks=1 tokens=40 context_tokens=40 logit_rows=1" in said
    assert log.count("in _wait_until") >= tp, "the stack of the thread that computes"
    assert re.search(r"a step does not end rank=\d running_s=[1-4]\.", log)
    assert re.search(r"the step has ended rank=\d took_s=", log)
    assert not any(str(token) in log for token in PROMPT), "tokens of the prompt are in the log"


async def test_a_step_past_its_limit_ends_the_worker_behind_its_stacks(folder: Path) -> None:
    """Also where the limit is the smaller one of the two."""
    settings = {"step_slow_s": 30.0, "step_watchdog_s": 1.5}
    async with worker_of(folder, 1, engine="sim", sim=HANGING, **settings) as worker:
        await worker.send(submit=submit("r", w.LEG_FULL, worker, PROMPT, max_tokens=2, ignore_eos=True))
        assert re.search(r"a step of rank 0 has been running for [2-4] s", (await last_words(worker)))
    log = (folder / "m0.log").read_text()
    assert log.count("m0/rank0 stacks of all threads") == 1
    assert "in _wait_until" in log


def test_a_rank_that_no_longer_ticks_writes_what_its_threads_do(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing of Python's runs there that could."""
    monkeypatch.setattr(rank_group, "MODULE", seized_rank.__name__)
    ClusterSecret.generate().save(folder / "secret")
    redis = PrivateRedis.start(folder / "redis", "test-password")
    config = WorkerConfig(
        cluster="test", worker_id="m0", role=RoleName.MIXED, pool="mixed", model=MODEL.name, model_dir=str(MODEL),
        revision="", dtype="float32", max_model_len=0, redis_url=redis.url, runtime_dir=str(folder),
        secret_file=str(folder / "secret"), settings=WorkerSection(threads=1, engine="sim", kv_memory_bytes=64 << 20),
    )  # fmt: skip
    (folder / "m0.json").write_bytes(dump(config))

    async def run() -> None:
        host = WorkerHost(config, folder / "m0.json", on_progress=lambda _: None)
        async with asyncio.timeout(60):
            await host.run(lambda _: None)

    try:
        with pytest.raises(ExceptionGroup) as raised:
            asyncio.run(run())
    finally:
        redis.stop()
    assert raised.group_contains(WorkerLostError, match="rank 0 has stopped")
    written = capfd.readouterr().err
    assert "Current thread" in written
    assert "in seize" in written
    assert "in _run" in written, "the thread that would tick"
