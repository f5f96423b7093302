"""One process that plays many scripted workers over the real worker protocol, and notes when what arrived and left.

All workers share one address; the router's hello names the incarnation that it means, and so which worker. Half of them
prefill, each prompt in PREFILL_S; the others decode: one step every `--step-ms` gives each of their sequences a token,
all in one message. They send what real workers send about a request's phases, about their load and to pings, made by
the same code.

On stdin: `report` asks for everything noted since the last one, as a line of JSON; the end of stdin ends the process.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import uvloop

from tandem.core.ids import WorkerId, new_incarnation
from tandem.core.lease_timing import BEAT_S, PROOF_OF_LIFE
from tandem.core.secret import ClusterSecret
from tandem.core.state_enums import RoleName
from tandem.rpc.v1 import generation_pb2 as g
from tandem.rpc.v1 import worker_pb2 as w
from tandem.statestore.connection import connect
from tandem.statestore.index.member_lease import WorkerLease
from tandem.statestore.keys import Keys
from tandem.workercore.proto_convert import each
from tandem.workerhost.relay import handlers, joined
from tandem.workerhost.stream_protocol import OutQueue
from tools.made_up_worker import MadeUpWorker, let_in

LOAD_S = 0.1
PREFILL_S = 0.005
"""So that a first token does not wait behind earlier messages about its request."""
PREFILL_TOKENS_PER_S = 1e6
"""As reported: so fast that no request waits in the router for room at a worker."""
BLOCK_TOKENS = 16
BLOCKS = 65_536


@dataclass(slots=True)
class Sequence:
    """One answer; token `next_index` comes next, `last_index` is the last."""

    request: str
    attempt: int
    next_index: int
    last_index: int


@dataclass(slots=True)
class Notes:
    """By request: when its prompt arrived at the worker that prefills, and when its first and last tokens left."""

    arrived_s: dict[str, float] = field(default_factory=dict)
    first_s: dict[str, float] = field(default_factory=dict)
    last_s: dict[str, float] = field(default_factory=dict)
    tokens: int = 0
    late_steps: int = 0
    steps: int = 0

    def take(self) -> str:
        rows = {
            request: (arrived_s, self.first_s.get(request), self.last_s.get(request))
            for request, arrived_s in self.arrived_s.items()
        }
        told = {"requests": rows, "tokens": self.tokens, "steps": self.steps, "late_steps": self.late_steps}
        self.arrived_s, self.first_s, self.last_s = {}, {}, {}
        self.tokens = self.steps = self.late_steps = 0
        return json.dumps(told)


class Worker:
    """One scripted worker: `outbox` holds its messages to its router."""

    def __init__(self, name: str, role: RoleName, fabric: Fabric) -> None:
        self.name, self.role, self.incarnation = WorkerId(name), role, new_incarnation()
        self.outbox = OutQueue()
        self._fabric = fabric
        self._announced: dict[str, Sequence] = {}
        self._handed_over: set[str] = set()
        self._decoding: dict[str, Sequence] = {}
        self._step_at_s = 0.0
        self._is_stepping = False
        self._is_changed = True

    def say(self, *, may_wait: bool = True, **message: Any) -> None:
        self.outbox.put(w.WorkerMessage(**message).SerializeToString(), may_wait=may_wait)

    def submit(self, submit: w.Submit) -> None:
        now_s = time.monotonic()
        request, self._is_changed = submit.request, True
        self._phase(submit, "queued")
        last = submit.sampling.max_tokens - 1
        if submit.leg == w.LEG_DECODE:
            self._announced[request] = Sequence(request, submit.attempt, 1, last)
            if request in self._handed_over:
                self._admit(request)
            return
        self._fabric.notes.arrived_s[request] = now_s
        self._phase(submit, "prefill")
        asyncio.get_running_loop().call_later(PREFILL_S, self._first_token, submit)

    def _first_token(self, submit: w.Submit) -> None:
        request, last = submit.request, submit.sampling.max_tokens - 1
        first = Sequence(request, submit.attempt, 0, last)
        if submit.leg == w.LEG_PREFILL:
            self._phase(submit, "transfer")
        self._tell([first], cached_tokens=0)
        self._fabric.notes.first_s[request] = time.monotonic()
        if last == 0:
            return
        if submit.leg == w.LEG_PREFILL:
            self._fabric.workers[submit.peer.incarnation].hand_over(request)
        else:
            self._decode(first)

    def hand_over(self, request: str) -> None:
        """Take over a request that another worker has prefilled."""
        self._handed_over.add(request)
        if request in self._announced:
            self._admit(request)

    def cancel(self, request: str) -> None:
        self._announced.pop(request, None)
        self._decoding.pop(request, None)
        self._handed_over.discard(request)
        self._is_changed = True

    def load(self) -> None:
        """Report how busy it is, if anything changed."""
        if not self._is_changed and not self._decoding:
            return
        self._is_changed = False
        used, count = 8 * len(self._decoding), len(self._decoding)
        report = w.LoadReport(
            running_requests=count, in_flight=count + len(self._announced), decoding_sequences=count,
            prefill_rate=PREFILL_TOKENS_PER_S, decode_step_s=self._fabric.step_s,
            decode_sequence_s=self._fabric.step_s / 64,
            queue_stretch=20.0, queue_max_overtake_s=30.0,
            blocks=[w.GroupBlocksCount(group=0, total=BLOCKS, free=BLOCKS - used, request=used)],
            counters={"steps": 1.0, "kv_sent_bytes": 1.0, "kv_received_bytes": 1.0},
        )  # fmt: skip
        self.say(load=report)

    def _phase(self, submit: w.Submit, phase: str) -> None:
        self.say(phase=w.RequestPhase(request=submit.request, attempt=submit.attempt, phase=phase))

    def _admit(self, request: str) -> None:
        self._handed_over.discard(request)
        sequence = self._announced.pop(request)
        self.say(phase=w.RequestPhase(request=request, attempt=sequence.attempt, phase="decode"))
        self._decode(sequence)

    def _decode(self, sequence: Sequence) -> None:
        self._decoding[sequence.request] = sequence
        if not self._is_stepping:
            self._is_stepping = True
            loop = asyncio.get_running_loop()
            self._step_at_s = loop.time() + self._fabric.step_s
            loop.call_at(self._step_at_s, self._step)

    def _step(self) -> None:
        loop, notes = asyncio.get_running_loop(), self._fabric.notes
        if not self._decoding:
            self._is_stepping = False
            return
        now_s = loop.time()
        notes.steps += 1
        notes.late_steps += now_s - self._step_at_s > self._fabric.step_s / 2
        sequences = list(self._decoding.values())
        self._tell(sequences)
        ended_s = time.monotonic()
        for sequence in sequences:
            if sequence.next_index > sequence.last_index:
                del self._decoding[sequence.request]
                notes.last_s[sequence.request] = ended_s
        self._step_at_s = max(now_s, self._step_at_s + self._fabric.step_s)
        loop.call_at(self._step_at_s, self._step)

    def _tell(self, sequences: list[Sequence], cached_tokens: int | None = None) -> None:
        """Send the next token of each in one message."""
        chunks = []
        for one in sequences:
            index = one.next_index
            one.next_index = index + 1
            finish = g.FINISH_REASON_LENGTH if index == one.last_index else g.FINISH_REASON_UNSPECIFIED
            token = 300 + (len(one.request) * 31 + 37 * index * index) % 3500
            chunks.append(
                w.TokenChunk(
                    request=one.request, attempt=one.attempt, index=index, tokens=(token,), finish=finish,
                    cached_tokens=cached_tokens,
                )
            )  # fmt: skip
        self._fabric.notes.tokens += len(chunks)
        self.say(tokens=w.StepTokens(chunks=chunks), may_wait=False)


@dataclass(slots=True)
class Fabric:
    """All workers by incarnation, and what they share."""

    step_s: float
    secret: ClusterSecret
    notes: Notes = field(default_factory=Notes)
    workers: dict[int, Worker] = field(default_factory=dict)
    address: str = ""

    def add(self, name: str, role: RoleName) -> None:
        worker = Worker(name, role, self)
        self.workers[worker.incarnation] = worker

    def facts(self, worker: Worker) -> MadeUpWorker:
        group = w.KvGroup(
            layers=list(range(4)), planes=2, heads=4, width=64, block_tokens=BLOCK_TOKENS, dtype="float32"
        )
        return MadeUpWorker(
            worker=worker.name, incarnation=worker.incarnation, role=worker.role, address=self.address,
            block_tokens=BLOCK_TOKENS, max_model_len=32_768, num_blocks=BLOCKS, token_kv_bytes=8192, groups=(group,),
            transports=("shm",), host="bench",
        )  # fmt: skip


class _Servicer:
    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric

    async def Stream(self, requests: Any, context: Any) -> AsyncIterator[bytes]:  # noqa: N802
        await let_in(context, self._fabric.secret)
        hello = (await anext(aiter(requests))).message.hello
        worker = self._fabric.workers[hello.worker_incarnation]
        yield w.WorkerMessage(hello=w.WorkerHello(info=self._fabric.facts(worker).info())).SerializeToString()
        reader = asyncio.create_task(self._read(worker, requests))
        try:
            while messages := await worker.outbox.take():
                for message in joined(messages):
                    yield message
        finally:
            reader.cancel()

    async def Peer(self, requests: Any, context: Any) -> AsyncIterator[bytes]:  # noqa: N802
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "these workers hand over without a word")
        yield b""

    async def _read(self, worker: Worker, requests: Any) -> None:
        async for heard in requests:
            for one in each(heard.message):
                self._take(worker, one)

    @staticmethod
    def _take(worker: Worker, message: w.RouterMessage) -> None:
        kind = message.WhichOneof("kind")
        if kind == "submit":
            worker.submit(message.submit)
        elif kind == "cancel":
            worker.cancel(message.cancel.request)
        elif kind == "ping":
            worker.say(pong=message.ping)


async def _beat(fabric: Fabric, redis_url: str, cluster: str) -> None:
    redis = await connect(redis_url)
    leases = [WorkerLease(redis, Keys(cluster)) for _ in fabric.workers]
    for lease, worker in zip(leases, fabric.workers.values(), strict=True):
        await lease.register(fabric.facts(worker).record())
    while True:
        for lease in leases:
            await lease.beat(0, 0, 0)
            await asyncio.sleep(BEAT_S / len(leases))


async def _report_loads(fabric: Fabric) -> None:
    while True:
        for worker in fabric.workers.values():
            worker.load()
            await asyncio.sleep(LOAD_S / len(fabric.workers))


async def _obey(fabric: Fabric) -> None:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while (line := await reader.readline()).strip() == b"report":
        sys.stdout.write(fabric.notes.take() + "\n")
        sys.stdout.flush()
    if line:
        raise SystemExit(f"the workers do not understand {line!r}")


async def _run(arguments: argparse.Namespace) -> None:
    fabric = Fabric(step_s=arguments.step_ms / 1000, secret=ClusterSecret.load(arguments.secret))
    for number in range(arguments.workers):
        role = RoleName.DECODE if number % 2 else RoleName.PREFILL
        fabric.add(f"{role.value}-{number // 2}", role)
    server = grpc.aio.server(options=[*PROOF_OF_LIFE, ("grpc.so_reuseport", 0)])
    servicer = _Servicer(fabric)
    server.add_generic_rpc_handlers((handlers(servicer.Stream, servicer.Peer),))
    fabric.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    tasks = [
        asyncio.create_task(_beat(fabric, arguments.redis, arguments.cluster)),
        asyncio.create_task(_report_loads(fabric)),
    ]
    gc.disable()  # pauses here would count as the router's
    obeying = asyncio.create_task(_obey(fabric))
    await asyncio.wait([obeying, *tasks], return_when=asyncio.FIRST_COMPLETED)
    for task in (*tasks, obeying):
        if task.done():
            task.result()
        task.cancel()
    await server.stop(0)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.router.workers", description=__doc__)
    parser.add_argument("--redis", required=True)
    parser.add_argument("--cluster", required=True)
    parser.add_argument("--secret", type=Path, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--step-ms", type=float, required=True)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(parser.parse_args()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
