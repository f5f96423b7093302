"""A worker that speaks the real protocol over real sockets and computes nothing: tokens are a function of the prompt.

Faults are settings of its `Script`. Workers that share a `Fabric` hand requests over to each other.
"""

import asyncio
import time
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
import grpc.aio

from tandem.core.block_hash import HashRoot, chain
from tandem.core.ids import Incarnation, WorkerId, new_incarnation
from tandem.core.lease_timing import PROOF_OF_LIFE
from tandem.core.secret import ClusterSecret
from tandem.core.state_enums import RoleName
from tandem.core.version import STREAM_VERSION, release
from tandem.rpc.v1 import control_pb2 as c
from tandem.rpc.v1 import generation_pb2 as g
from tandem.rpc.v1 import worker_pb2 as w
from tandem.rpc.v1 import worker_pb2_grpc as w_grpc
from tandem.workercore.proto_convert import each
from tools.made_up_worker import EOS, MadeUpWorker, let_in

Answerer = Callable[[w.Submit, int], list[int]]
"""(request, choice) → all output tokens of that choice; EOS ends it with STOP, else it ends with LENGTH."""
KV_TOKEN_BYTES = 64
"""As it registers."""


def plain_answer(submit: w.Submit, choice: int) -> list[int]:
    """Readable or not, but the same for the same prompt, seed and choice."""
    base = sum((position + 1) * token for position, token in enumerate(submit.prompt)) + 97 * choice
    base += submit.sampling.seed % 1009 if submit.sampling.temperature else 0
    return [300 + (base + 37 * index * index) % 3500 for index in range(submit.sampling.max_tokens)]


@dataclass
class Script:
    """How a worker behaves."""

    answer: Answerer = plain_answer
    step_s: float = 0.0005
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    is_held: bool = False
    """Compute no prompt for as long as this is so."""
    chunk_tokens: int = 3
    """Prompt tokens whose log-probabilities it reports at once."""
    cached_tokens: int = 0
    stall_at: int | None = None
    """Send nothing from this output index on."""
    refuse: tuple[str, str] | None = None
    """Code and message for every submission."""
    duplicates: bool = False
    other_attempts: bool = False
    is_stubborn: bool = False
    """Go on with choices that were cancelled."""
    is_mute: bool = False
    """Answer nothing at all, pings included, after the hello."""
    version: str = field(default_factory=release)
    clock_ahead_s: float = 0.0


class Fabric:
    """Where a prefill worker leaves word for the decode worker."""

    def __init__(self) -> None:
        self._events: dict[tuple[str, int], asyncio.Event] = {}

    def event(self, request: str, attempt: int) -> asyncio.Event:
        return self._events.setdefault((request, attempt), asyncio.Event())


@dataclass
class ScriptedWorker:
    """`address` is known after `start`. All that it received is kept for tests to look at."""

    worker: WorkerId
    role: RoleName
    fabric: Fabric
    secret: ClusterSecret
    script: Script = field(default_factory=Script)
    fingerprint: str = "f" * 32
    model: str = "tandem-tiny"
    block_tokens: int = 16
    max_model_len: int = 4096
    num_blocks: int = 512
    protocol: int = STREAM_VERSION

    def __post_init__(self) -> None:
        self.incarnation: Incarnation = new_incarnation()
        self.address = ""
        self.submits: list[w.Submit] = []
        self.cancels: list[w.Cancel] = []
        self.ended: list[w.EndChoices] = []
        self.said: Counter[tuple[str, int]] = Counter()
        """Tokens of every choice of a request."""
        self.hash_mismatches: list[str] = []
        self.streams = 0
        self.running: dict[tuple[str, int], asyncio.Task[None]] = {}
        self.load: w.LoadReport | None = None
        self._server: Any = None

    @property
    def submitted(self) -> list[w.Submit]:
        """Submissions of clients, without the router's probes."""
        return [submit for submit in self.submits if not submit.request.startswith("probe")]

    @property
    def cancelled(self) -> list[w.Cancel]:
        """Cancels of clients' requests, without those of the router's probes."""
        return [cancel for cancel in self.cancels if not cancel.request.startswith("probe")]

    async def start(self) -> None:
        server = grpc.aio.server(options=[*PROOF_OF_LIFE, ("grpc.so_reuseport", 0)])
        w_grpc.add_WorkerServicer_to_server(_Servicer(self), server)
        port = server.add_insecure_port(self.address or "127.0.0.1:0")
        await server.start()
        self.address, self._server = f"127.0.0.1:{port}", server

    @property
    def is_running(self) -> bool:
        return self._server is not None

    async def stop(self) -> None:
        """Die: streams break at once."""
        for task in list(self.running.values()):
            task.cancel()
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    async def restart(self) -> None:
        await self.stop()
        self.incarnation = new_incarnation()
        await self.start()

    @property
    def facts(self) -> MadeUpWorker:
        """Return its own description."""
        return MadeUpWorker(
            worker=self.worker, incarnation=self.incarnation, role=self.role, address=self.address, model=self.model,
            fingerprint=self.fingerprint, block_tokens=self.block_tokens, max_model_len=self.max_model_len,
            num_blocks=self.num_blocks, token_kv_bytes=KV_TOKEN_BYTES, protocol=self.protocol,
        )  # fmt: skip


class _Servicer(w_grpc.WorkerServicer):
    def __init__(self, worker: ScriptedWorker) -> None:
        self._worker = worker

    async def Stream(self, requests: Any, context: Any) -> AsyncIterator[w.WorkerMessage]:  # noqa: N802
        worker = self._worker
        await let_in(context, worker.secret)
        hello = await anext(aiter(requests))
        assert hello.WhichOneof("kind") == "hello"
        # Real workers refuse a hello to another incarnation; this one leaves that to the router, which must see it too.
        worker.streams += 1
        outbox: asyncio.Queue[w.WorkerMessage] = asyncio.Queue()
        script = worker.script
        hello = w.WorkerHello(
            info=worker.facts.info(), version=script.version, wall_s=time.time() + script.clock_ahead_s
        )
        outbox.put_nowait(w.WorkerMessage(hello=hello))
        running: dict[tuple[str, int], asyncio.Task[None]] = {}
        reader = asyncio.create_task(self._read(requests, outbox, running))
        try:
            while True:
                yield await outbox.get()
        finally:  # at any time after the stream broke: a newer one's requests are none of its business
            reader.cancel()
            for task in list(running.values()):
                task.cancel()

    async def Peer(self, requests: Any, context: Any) -> AsyncIterator[w.PeerMessage]:  # noqa: N802
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "scripted workers hand over through their fabric")
        yield w.PeerMessage()

    async def Control(self, request: Any, context: Any) -> c.ControlReply:  # noqa: N802
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "scripted workers are not steered")
        return c.ControlReply()

    async def _read(
        self, requests: Any, outbox: asyncio.Queue[w.WorkerMessage], running: dict[tuple[str, int], asyncio.Task[None]]
    ) -> None:
        worker = self._worker
        async for message in _each(requests):
            kind = message.WhichOneof("kind")
            if kind == "submit":
                message.submit.prompt.extend(array("I", message.submit.prompt_ids))
                worker.submits.append(message.submit)
                key = (message.submit.request, message.submit.attempt)
                task = asyncio.create_task(_Run(worker, message.submit, outbox).run())
                worker.running[key] = running[key] = task
                task.add_done_callback(partial(_forget, worker.running, key))
                task.add_done_callback(partial(_forget, running, key))
            elif kind == "cancel":
                worker.cancels.append(message.cancel)
                unwanted = running.get((message.cancel.request, message.cancel.attempt))
                if unwanted is not None:
                    unwanted.cancel()
            elif kind == "end_choices":
                worker.ended.append(message.end_choices)
            elif kind == "ping" and not worker.script.is_mute:
                outbox.put_nowait(w.WorkerMessage(pong=message.ping))
                if worker.load is not None:
                    outbox.put_nowait(w.WorkerMessage(load=worker.load))


async def _each(requests: Any) -> AsyncIterator[w.RouterMessage]:
    async for message in requests:
        for one in each(message):
            yield one


def _forget(running: dict[tuple[str, int], asyncio.Task[None]], key: tuple[str, int], task: asyncio.Task[None]) -> None:
    if running.get(key) is task:
        del running[key]


class _Run:
    """One attempt of a request at one worker. It goes on after what is forced; a step is a token of every choice."""

    def __init__(self, worker: ScriptedWorker, submit: w.Submit, outbox: asyncio.Queue[w.WorkerMessage]) -> None:
        self._worker, self._submit, self._outbox = worker, submit, outbox
        self._script = worker.script
        forced = {state.choice: state for state in submit.forced}
        choices = [choice for choice in range(submit.sampling.n) if choice not in forced or not forced[choice].finish]
        self._answers = {choice: self._script.answer(submit, choice) for choice in choices}
        self._starts = {choice: len(forced[choice].tokens) if choice in forced else 0 for choice in choices}
        for choice, start in self._starts.items():
            assert start == 0 or list(forced[choice].tokens) == self._answers[choice][:start]

    async def run(self) -> None:
        submit, script = self._submit, self._script
        self._check_hash()
        if script.refuse is not None:
            code, message = script.refuse
            failed = w.RequestFailed(request=submit.request, attempt=submit.attempt, code=code, message=message)
            self._outbox.put_nowait(w.WorkerMessage(failed=failed))
            return
        handed_over = self._worker.fabric.event(submit.request, submit.attempt)
        if submit.leg == w.LEG_PREFILL:
            await self._prefill()
            await self._send(0)
            self._say_phase("transfer")
            handed_over.set()
        elif submit.leg == w.LEG_DECODE:
            await handed_over.wait()
            await asyncio.sleep(self._script.transfer_s)
            self._say_phase("decode")
            await self._decode(1)
        else:
            await self._prefill()
            await self._decode(0)

    async def _prefill(self) -> None:
        self._say_phase("prefill")
        while self._script.is_held:
            await asyncio.sleep(0.002)
        await asyncio.sleep(self._script.prefill_s)
        if self._submit.sampling.HasField("prompt_logprobs"):
            for first in range(1, len(self._submit.prompt), self._script.chunk_tokens):
                prompts = [self._prompt_chunk(first)]
                self._outbox.put_nowait(w.WorkerMessage(tokens=w.StepTokens(prompts=prompts)))

    def _say_phase(self, name: str) -> None:
        phase = w.RequestPhase(request=self._submit.request, attempt=self._submit.attempt, phase=name)
        self._outbox.put_nowait(w.WorkerMessage(phase=phase))

    async def _decode(self, first: int) -> None:
        steps = max(len(answer) - self._starts[choice] for choice, answer in self._answers.items())
        for step in range(first, steps):
            await asyncio.sleep(self._script.step_s)
            await self._send(step)

    async def _send(self, step: int) -> None:
        script = self._script
        reached = max(start + step for start in self._starts.values())
        if script.is_mute or (script.stall_at is not None and reached >= script.stall_at):
            await asyncio.Event().wait()
        chunks = self._chunks(step)
        self._worker.said.update((chunk.request, chunk.choice) for chunk in chunks)
        if script.duplicates:
            chunks = [*chunks, *chunks, *(self._chunks(step - 1) if step else ())]
        if script.other_attempts:
            chunks = [*(self._foreign(chunk) for chunk in chunks), *chunks]
        self._outbox.put_nowait(w.WorkerMessage(tokens=w.StepTokens(chunks=chunks)))

    def _chunks(self, step: int) -> list[w.TokenChunk]:
        ended = {choice for end in self._worker.ended if end.request == self._submit.request for choice in end.choices}
        ended = set() if self._script.is_stubborn else ended
        indices = {choice: start + step for choice, start in self._starts.items() if choice not in ended}
        return [self._chunk(choice, at, step) for choice, at in indices.items() if at < len(self._answers[choice])]

    def _chunk(self, choice: int, index: int, step: int) -> w.TokenChunk:
        answer, submit = self._answers[choice], self._submit
        token = answer[index]
        chunk = w.TokenChunk(request=submit.request, attempt=submit.attempt, choice=choice, index=index, tokens=[token])
        if token == EOS and not submit.sampling.ignore_eos:
            chunk.finish = g.FINISH_REASON_STOP
        elif index == len(answer) - 1:
            chunk.finish = g.FINISH_REASON_LENGTH
        if submit.sampling.HasField("logprobs"):
            others = [g.TopLogprob(token=token + n, logprob=-0.5 - n) for n in range(submit.sampling.logprobs)]
            chunk.logprobs.append(g.TokenLogprob(token=token, logprob=-0.25, top=others))
        if step == 0:
            chunk.cached_tokens = self._script.cached_tokens
        if step == 1 and submit.leg == w.LEG_DECODE:
            timing = g.HandoffTiming(ticket_wait_s=0.0, sample_to_step_s=0.003, last_wire_s=0.001, step_rest_s=0.0)
            chunk.handoff.CopyFrom(timing)
        return chunk

    def _prompt_chunk(self, first: int) -> w.PromptChunk:
        submit = self._submit
        chunk = w.PromptChunk(request=submit.request, attempt=submit.attempt, position=first)
        for place, token in enumerate(submit.prompt[first : first + self._script.chunk_tokens], first):
            count = submit.sampling.prompt_logprobs
            others = [g.TopLogprob(token=(token + n) % 4096, logprob=-0.5 - n) for n in range(1, count + 1)]
            chunk.logprobs.append(g.TokenLogprob(token=token, logprob=-place / 8, top=others, rank=count + 1))
        return chunk

    def _foreign(self, chunk: w.TokenChunk) -> w.TokenChunk:
        other = w.TokenChunk()
        other.CopyFrom(chunk)
        other.attempt = chunk.attempt + 7
        other.tokens[:] = [(token + 5) % 4096 for token in chunk.tokens]
        other.finish = g.FINISH_REASON_STOP
        return other

    def _check_hash(self) -> None:
        submit, worker = self._submit, self._worker
        root = HashRoot(fingerprint=worker.fingerprint, block_tokens=worker.block_tokens, salt=submit.salt).digest()
        hashes = chain(root, submit.prompt, worker.block_tokens)
        if submit.last_block_hash != (hashes[-1] if hashes else b""):
            worker.hash_mismatches.append(submit.request)
