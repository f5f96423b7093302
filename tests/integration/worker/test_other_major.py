"""A decode worker of another major version: the router gets the reason, as a failure that may be retried elsewhere."""

import asyncio
from pathlib import Path
from typing import Any

import grpc.aio

from tandem.core.errors import from_code
from tandem.core.kv_compatibility import PROTOCOL
from tandem.core.lease_timing import PROOF_OF_LIFE
from tandem.core.secret import ClusterSecret
from tandem.core.state_enums import RoleName
from tandem.rpc.v1 import generation_pb2 as g
from tandem.rpc.v1 import worker_pb2 as w
from tandem.rpc.v1 import worker_pb2_grpc
from tandem.statestore.embedded_redis import PrivateRedis
from tests.integration.worker.pair import start_worker
from tests.integration.workerhost.service import Stranger


def test_the_router_hears_why_the_hand_over_failed(folder: Path) -> None:
    secret = ClusterSecret.generate()
    secret.save(folder / "secret")

    async def run(redis_url: str) -> w.RequestFailed:
        server = grpc.aio.server(options=PROOF_OF_LIFE)
        worker_pb2_grpc.add_WorkerServicer_to_server(Stranger(PROTOCOL[0] + 1, 0, secret), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        worker = await start_worker(folder, "p0", RoleName.PREFILL, redis_url)
        try:
            async with asyncio.TaskGroup() as tasks:
                await worker.open(secret, tasks)
                await worker.send(
                    submit=submission(w.WorkerRef(worker="d0", incarnation=5, address=f"127.0.0.1:{port}"))
                )
                failed = await _failure(worker.messages)
                await worker.close()
        finally:
            worker.process.terminate()
            await asyncio.wait_for(worker.process.wait(), 20)
            await server.stop(None)
        return failed

    redis = PrivateRedis.start(folder / "redis", "test-password")
    try:
        failed = asyncio.run(run(redis.url))
    finally:
        redis.stop()
    assert failed.request == "r1"
    assert "decode worker d0 was lost during the hand-over" in failed.message
    assert f"protocol differs: {PROTOCOL[0] + 1}.0 and {PROTOCOL[0]}." in failed.message
    assert from_code(failed.code, failed.message).retryable


def submission(peer: w.WorkerRef) -> w.Submit:
    sampling = g.SamplingParams(max_tokens=8, n=1, top_p=1.0, repetition_penalty=1.0, ignore_eos=True)
    return w.Submit(
        request="r1", attempt=1, leg=w.LEG_PREFILL, peer=peer, prompt=range(10, 110), sampling=sampling, timeout_s=60
    )


async def _failure(messages: asyncio.Queue[Any]) -> w.RequestFailed:
    async with asyncio.timeout(30):
        while True:
            message: w.WorkerMessage = await messages.get()
            if message.HasField("failed"):
                return message.failed
