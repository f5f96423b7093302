"""A prefill and a decode worker as real processes on a real Redis, and the router's side of their streams."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio

from tandem.core.call_proof import STREAM, CallProof, stream_target
from tandem.core.clock import MonotonicClock
from tandem.core.config import WorkerConfig, WorkerSection
from tandem.core.config_loader import dump
from tandem.core.parent_death_signal import tied
from tandem.core.secret import ClusterSecret
from tandem.core.state_enums import RoleName
from tandem.router.workers import proto_convert as router_wire
from tandem.rpc.v1 import generation_pb2 as g
from tandem.rpc.v1 import worker_pb2 as w
from tandem.rpc.v1 import worker_pb2_grpc
from tandem.statestore.embedded_redis import PrivateRedis

MODEL = Path(__file__).parents[3] / "models" / "tandem-tiny"
START_TIMEOUT_S = 120.0
END: Any = grpc.aio.EOF  # type: ignore[attr-defined]


class RunningWorker:
    """One worker process and one open router stream to it. `progress`: its reports while it started; `ready_s`: when it
    reported that it is ready."""

    def __init__(
        self, name: str, process: asyncio.subprocess.Process, ready: dict[str, Any], progress: list[str]
    ) -> None:
        self.name, self.process, self.ready, self.progress = name, process, ready, progress
        self.ready_s = MonotonicClock().now_s()
        self.messages: asyncio.Queue[w.WorkerMessage] = asyncio.Queue()
        self.load = w.LoadReport()
        self._call: Any = None
        self._writing = asyncio.Lock()  # gRPC loses writes that overlap

    @property
    def ref(self) -> w.WorkerRef:
        incarnation = int(self.ready["incarnation"])
        return w.WorkerRef(worker=self.name, incarnation=incarnation, address=self.ready["address"])

    @property
    def rank_pid(self) -> int:
        return int(self.ready["rank_pids"][0])

    def another_router(self) -> RunningWorker:
        """The same process, for the stream of a second router."""
        return RunningWorker(self.name, self.process, self.ready, self.progress)

    async def open(self, secret: ClusterSecret, tasks: asyncio.TaskGroup, router: str = "test") -> None:
        channel: Any = grpc.aio.insecure_channel(self.ready["address"])
        stub: Any = worker_pb2_grpc.WorkerStub(channel)
        self._call = stub.Stream(
            metadata=CallProof.of(secret, STREAM, stream_target(self.name, int(self.ready["incarnation"]))).metadata
        )
        await self._call.write(router_wire.hello(router, 1, int(self.ready["incarnation"])))
        reader = tasks.create_task(self._read())
        pinger = tasks.create_task(self._ping())
        self._tasks = (reader, pinger, channel)

    async def send(self, **kind: Any) -> None:
        async with self._writing:
            await self._call.write(w.RouterMessage(**kind))

    async def close(self) -> None:
        reader, pinger, channel = self._tasks
        pinger.cancel()
        reader.cancel()
        self._call.cancel()
        await asyncio.gather(reader, pinger, return_exceptions=True)
        await channel.close()

    async def _read(self) -> None:
        while True:
            try:
                message = await self._call.read()
            except grpc.aio.AioRpcError:
                message = END
            if message is END:
                await self.messages.put(w.WorkerMessage())
                return
            for one in router_wire.each(message):
                if one.HasField("load"):
                    self.load = one.load
                elif not one.HasField("pong") and not one.HasField("phase"):
                    await self.messages.put(one)

    async def _ping(self) -> None:
        sequence = 0
        while True:
            sequence += 1
            try:
                await self.send(ping=w.Ping(sequence=sequence))
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return
            await asyncio.sleep(0.5)


def shape_in(folder: Path, **changes: Any) -> Path:
    """Copy the bundled model without its weights; `changes` are to its config. Returns the folder, which is made."""
    folder.mkdir()
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, folder / name)
    config = json.loads((MODEL / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


async def start_worker(
    folder: Path,
    name: str,
    role: RoleName,
    redis_url: str,
    model: Path = MODEL,
    runtime_dir: Path | None = None,
    **settings: Any,
) -> RunningWorker:
    """Start a worker process and wait until it is ready; its log, and its sockets unless set otherwise, land in
    `folder`."""
    config = WorkerConfig(
        cluster="test",
        worker_id=name,
        role=role,
        pool=role.value,
        model="tandem-tiny",
        model_dir=str(model),
        revision="",
        dtype=settings.pop("dtype", "float32"),
        max_model_len=settings.pop("max_model_len", 0),
        redis_url=redis_url,
        secret_file=str(folder / "secret"),
        runtime_dir=str(runtime_dir or folder),
        settings=dataclasses.replace(WorkerSection(threads=1, kv_memory_bytes=64 << 20), **settings),
    )
    file = folder / f"{name}.json"
    file.write_bytes(dump(config))
    log = (folder / f"{name}.log").open("wb")
    process = await asyncio.create_subprocess_exec(
        *tied([sys.executable, "-m", "tandem.worker", f"--config={file}"]),
        stdout=asyncio.subprocess.PIPE,
        stderr=log,
        stdin=asyncio.subprocess.DEVNULL,
    )
    log.close()
    assert process.stdout is not None
    progress: list[str] = []
    async with asyncio.timeout(START_TIMEOUT_S):
        async for raw in process.stdout:
            line = json.loads(raw)
            if "progress" in line:
                progress.append(line["progress"])
            if "ready" in line:
                return RunningWorker(name, process, line["ready"], progress)
            if "fatal" in line:
                await process.wait()
                process._transport.close()  # type: ignore[attr-defined]
                raise RuntimeError(line["fatal"])
    raise RuntimeError(f"{name} ended with {await process.wait()}: {(folder / f'{name}.log').read_text()[-3000:]}")


@asynccontextmanager
async def pair(
    folder: Path, *, prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[tuple[RunningWorker, RunningWorker]]:
    """A prefill and a decode worker with open streams; everything is taken down at the end.

    `settings` are those of both, `prefill` and `decode` what one of them has besides.
    """
    secret = ClusterSecret.generate()
    secret.save(folder / "secret")
    redis = PrivateRedis.start(folder / "redis", "test-password")
    workers: list[RunningWorker] = []
    try:
        roles = (("p0", RoleName.PREFILL, prefill), ("d0", RoleName.DECODE, decode))
        for name, role, own in roles:
            workers.append(await start_worker(folder, name, role, redis.url, **settings, **(own or {})))
        async with asyncio.TaskGroup() as tasks:
            for worker in workers:
                await worker.open(secret, tasks)
            yield workers[0], workers[1]
            for worker in workers:
                await worker.close()
    finally:
        for worker in workers:
            await stop(worker)
        redis.stop()


async def stop(worker: RunningWorker) -> None:
    """End a worker's process, if it has not ended."""
    if worker.process.returncode is None:
        worker.process.terminate()
    await asyncio.wait_for(worker.process.wait(), 60)
    worker.process._transport.close()  # type: ignore[attr-defined]


def submit(request: str, leg: Any, peer: RunningWorker, prompt: list[int], **sampling: Any) -> w.Submit:
    """A greedy request unless `sampling` sets otherwise."""
    values = {"max_tokens": 8, "n": 1, "temperature": 0.0, "top_p": 1.0, "repetition_penalty": 1.0, **sampling}
    return w.Submit(
        request=request,
        attempt=1,
        leg=leg,
        peer=peer.ref,
        prompt=prompt,
        sampling=g.SamplingParams(**values),
        timeout_s=60,
    )


async def tokens_of(worker: RunningWorker, request: str, count: int, start: int = 0) -> list[int]:
    """The worker's next tokens of one request, by index; nothing of another may come between."""
    tokens: list[int] = []
    async with asyncio.timeout(60):
        while len(tokens) < count:
            message = await worker.messages.get()
            assert not message.HasField("failed"), message
            for chunk in message.tokens.chunks:
                assert chunk.request == request
                assert chunk.index == start + len(tokens)
                tokens += chunk.tokens
    return tokens


async def handed_over(p: RunningWorker, d: RunningWorker, request: str, prompt: list[int], count: int) -> list[int]:
    """Return its tokens; the decode worker sends all but the first."""
    await d.send(submit=submit(request, w.LEG_DECODE, p, prompt, max_tokens=count, ignore_eos=True))
    await p.send(submit=submit(request, w.LEG_PREFILL, d, prompt, max_tokens=count, ignore_eos=True))
    first = await tokens_of(p, request, 1)
    return first + await tokens_of(d, request, count - 1, start=1)


async def alone(worker: RunningWorker, request: str, prompt: list[int], count: int) -> list[int]:
    await worker.send(submit=submit(request, w.LEG_FULL, worker, prompt, max_tokens=count, ignore_eos=True))
    return await tokens_of(worker, request, count)
