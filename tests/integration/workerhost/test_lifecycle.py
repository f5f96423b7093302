"""A real worker on a real Redis, drained, taken back and given other roles; the test is its router."""

import asyncio
import functools
import os
import signal
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from redis.asyncio import Redis

from tandem.controlplane.worker_control import WorkerControlClient, WorkerLook
from tandem.core.call_proof import CONTROL, PEER, STREAM, CallProof, stream_target
from tandem.core.config import SimSection
from tandem.core.errors import AuthError, NotFoundError, UnavailableError
from tandem.core.ids import Incarnation, WorkerId
from tandem.core.lease_timing import LEASE_S
from tandem.core.secret import ClusterSecret
from tandem.core.state_enums import RoleName, WorkerState
from tandem.core.version import STREAM_VERSION
from tandem.engine.sim.arithmetic import expected_tokens
from tandem.rpc.v1 import control_pb2 as c
from tandem.rpc.v1 import worker_pb2 as w
from tandem.rpc.v1 import worker_pb2_grpc
from tandem.statestore.connection import connect
from tandem.statestore.embedded_redis import PrivateRedis
from tandem.statestore.keys import Keys, Member
from tandem.statestore.records import WorkerRecord
from tests.integration.worker.pair import MODEL, RunningWorker, shape_in, start_worker, stop, submit
from tools.waiting import wait_for_async

PROMPT = [(7 * i) % 4000 + 10 for i in range(100)]
KEYS = Keys("test")
D0 = WorkerId("d0")
SLOW = SimSection(decode_step_s=0.02)


def oracle(count: int) -> list[int]:
    return expected_tokens(PROMPT, count, 4096, eos_token_ids=(1,))


@dataclass
class Scene:
    """One worker, d0. `tokens`, `cached`, `states` and `failed` are its messages to this router, by request."""

    at: RunningWorker
    server: PrivateRedis
    redis: Redis
    secret: ClusterSecret
    tasks: asyncio.TaskGroup
    tokens: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    cached: dict[str, int] = field(default_factory=dict)
    states: list[w.WorkerState] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    is_over: bool = False

    @property
    def address(self) -> str:
        return str(self.at.ready["address"])

    @property
    def control(self) -> WorkerControlClient:
        return WorkerControlClient(self.secret, lambda _: self.address)

    async def meet(self) -> w.WorkerInfo:
        """Open a stream to its present incarnation; return the contents of its hello."""
        self.at.ready["incarnation"] = (await self.control.look(D0)).incarnation
        self.at.messages = asyncio.Queue()
        self.is_over = False
        await self.at.open(self.secret, self.tasks)
        return (await asyncio.wait_for(self.at.messages.get(), 60)).hello.info

    async def ask(self, request: str, leg: Any, count: int) -> None:
        await self.at.send(submit=submit(request, leg, self.at, PROMPT, max_tokens=count, ignore_eos=True))

    async def acknowledge(self) -> None:
        """Acknowledge as a router does, once the worker has reported that it drains."""
        await self.until(lambda: bool(self.states))
        await self.at.send(state_heard=w.StateHeard(sequence=self.states[-1].sequence))

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(60):
            while not condition():
                self._take(await self.at.messages.get())

    def _take(self, message: w.WorkerMessage) -> None:
        kind = message.WhichOneof("kind")
        self.is_over |= kind is None
        if kind == "state":
            self.states.append(message.state)
        elif kind == "failed":
            self.failed[message.failed.request] = message.failed.code
        for chunk in message.tokens.chunks:
            assert chunk.index == len(self.tokens[chunk.request]), "a token twice, or one missing"
            self.tokens[chunk.request] += chunk.tokens
            if chunk.HasField("cached_tokens"):
                self.cached[chunk.request] = chunk.cached_tokens

    async def until_look(self, is_so: Any) -> WorkerLook:
        look: WorkerLook | None = None

        async def is_there() -> bool:
            nonlocal look
            look = await self.control.look(D0)
            return bool(is_so(look))

        try:
            await wait_for_async(is_there)
        except AssertionError as error:
            raise AssertionError(f"{error}; it is {look}") from error
        assert look is not None
        return look

    async def until_settled(self, is_so: Any) -> WorkerLook:
        """Wait until it is ready, and the registry agrees."""
        while True:
            look = await self.until_look(lambda look: look.state is WorkerState.READY and is_so(look))
            record = await self.record()
            if record is not None and (record.role, record.incarnation) == (look.role.value, look.incarnation):
                return look

    async def record(self) -> WorkerRecord | None:
        values = await self.redis.hmget(KEYS.lease(Member.WORKER, D0), "incarnation", "record")
        if not values[0] or not int(values[0]):
            return None
        record = WorkerRecord.from_json(values[1] or b"")
        assert record.incarnation == int(values[0])
        return record

    async def until_recorded(self, **values: Any) -> WorkerRecord:
        async def found() -> WorkerRecord | None:
            record = await self.record()
            return record if record is not None and replace(record, **values) == record else None

        record: WorkerRecord = await wait_for_async(found)
        return record

    def signal(self, number: signal.Signals) -> None:
        """To all of the worker."""
        for pid in (self.at.process.pid, self.at.rank_pid):
            os.kill(pid, number)


@asynccontextmanager
async def scene(folder: Path, tp: int = 1) -> AsyncIterator[Scene]:
    """d0, a decode worker of `tp` ranks; a token takes 20 ms."""
    secret = ClusterSecret.generate()
    secret.save(folder / "secret")
    server = PrivateRedis.start(folder / "redis", "test-password")
    redis = await connect(server.url)
    worker: RunningWorker | None = None
    try:
        shape = MODEL if tp == 1 else shape_in(folder / "tandem-tiny", num_key_value_heads=2)  # two ranks can share it
        worker = await start_worker(folder, D0, RoleName.DECODE, server.url, model=shape, engine="sim", sim=SLOW, tp=tp)
        async with asyncio.TaskGroup() as tasks:
            made = Scene(worker, server, redis, secret, tasks)
            await made.meet()
            yield made
            await worker.close()
    finally:
        if worker is not None:
            await stop(worker)
        await redis.aclose()
        server.stop()


async def test_a_worker_drains_and_comes_back(folder: Path) -> None:
    """Running requests end there; it is drained once nothing runs and its router has acknowledged, and not before."""
    async with scene(folder) as s:
        first = await s.control.look(D0)
        assert (first.state, first.role, first.in_flight) == (WorkerState.READY, RoleName.DECODE, 0)
        await s.ask("r1", w.LEG_FULL, 250)  # 5 s
        await s.until(lambda: len(s.tokens["r1"]) > 2)
        look = await s.control.drain(D0)
        assert (look.state, look.in_flight) == (WorkerState.DRAINING, 1)
        assert await s.control.drain(D0) == look, "once more changes nothing"
        await s.until_recorded(state="draining", incarnation=first.incarnation)
        await s.ask("r2", w.LEG_FULL, 5)  # was on its way
        await s.until(lambda: len(s.tokens["r1"]) == 250 and len(s.tokens["r2"]) == 5)
        look = await s.until_look(lambda look: not look.in_flight)
        assert look.state is WorkerState.DRAINING
        await s.acknowledge()
        look = await s.until_look(lambda look: look.is_drained)
        assert (look.in_flight, look.leases, look.incarnation) == (0, 0, first.incarnation)
        await s.until_recorded(state="drained", incarnation=first.incarnation)
        assert (await s.control.uncordon(D0)).state is WorkerState.READY
        await s.until_recorded(state="ready", incarnation=first.incarnation)
        await s.until(lambda: s.states[-1].state == "ready")
        assert [said.state for said in s.states] == ["draining", "drained", "ready"]
        assert len({said.sequence for said in s.states}) == 1
        assert not any(said.hands_back for said in s.states)
        assert (s.tokens["r1"], s.tokens["r2"]) == (oracle(250), oracle(5))


async def test_a_router_that_connects_hears_of_the_state_in_the_hello(folder: Path) -> None:
    async with scene(folder) as s:
        other = s.at.another_router()
        await other.open(s.secret, s.tasks, "other")
        running = submit("r1", w.LEG_FULL, s.at, PROMPT, max_tokens=1000, ignore_eos=True)
        await other.send(submit=running)  # so that it is not drained at once
        await s.until_look(lambda look: look.in_flight)
        await s.control.drain(D0)
        await s.at.close()
        assert (await s.meet()).state == "draining"
        await other.close()
        await s.until_look(lambda look: look.is_drained)
        await s.at.close()
        assert (await s.meet()).state == "drained"
        await s.until_look(lambda look: look.is_drained)


async def test_what_runs_past_the_deadline_is_handed_back(folder: Path) -> None:
    """The worker reports it once, and goes on until its router takes the request away."""
    async with scene(folder) as s:
        await s.ask("r1", w.LEG_FULL, 1000)
        await s.until(lambda: len(s.tokens["r1"]) > 2)
        await s.control.drain(D0, 0.2)
        await s.until(lambda: any(said.hands_back for said in s.states))
        assert [said.hands_back for said in s.states] == [False, True]
        before = len(s.tokens["r1"])
        await s.until(lambda: len(s.tokens["r1"]) > before + 2)
        await s.acknowledge()
        await s.at.send(cancel=w.Cancel(request="r1", attempt=1, reason="moved"))
        await s.until_look(lambda look: look.is_drained)


@pytest.mark.parametrize("tp", [1, 2])
async def test_another_role_and_back(folder: Path, tp: int) -> None:
    """As other incarnations, with the cache of the first; the one before is met nowhere any more."""
    async with scene(folder, tp) as s:
        before = (await s.control.look(D0)).incarnation
        await s.ask("r1", w.LEG_FULL, 20)
        await s.until(lambda: len(s.tokens["r1"]) == 20)
        refused = {RoleName.PREFILL: w.LEG_DECODE, RoleName.DECODE: w.LEG_PREFILL}
        for flips, role in enumerate((RoleName.PREFILL, RoleName.DECODE), 1):
            s.states.clear()
            look = await s.control.become(D0, role)
            assert (look.target, look.incarnation) == (role, before)
            await s.acknowledge()
            look = await s.until_look(lambda look, flips=flips: look.flips == flips)
            assert (look.role, look.state, look.target) == (role, WorkerState.READY, None)
            assert look.incarnation != before
            assert look.last_flip_s > 0
            assert look.flip_failure == ""
            await s.until(lambda: s.is_over)
            await s.at.close()
            await is_fenced(s, before)
            await s.until_recorded(role=role.value, incarnation=look.incarnation, state="ready")
            await wait_for_async(functools.partial(s.redis.scard, KEYS.blocks(D0, look.incarnation)))
            info = await s.meet()
            assert (info.role, info.state, info.incarnation) == (role.value, "ready", look.incarnation)
            await s.ask(f"whole as {role}", w.LEG_FULL, 1)
            await s.ask(f"refused as {role}", refused[role], 5)
            await s.until(lambda role=role: f"refused as {role}" in s.failed and s.tokens[f"whole as {role}"])
            assert s.cached[f"whole as {role}"] == 96, "all full blocks of the prompt"
            assert s.tokens[f"whole as {role}"] == oracle(1)
            assert s.failed[f"refused as {role}"] == "invalid_request"
            before = look.incarnation


@pytest.mark.parametrize("by", ["uncordon", "become"])
async def test_a_change_of_role_is_undone_half_way(folder: Path, by: str) -> None:
    async with scene(folder) as s:
        before = await s.control.look(D0)
        await s.ask("r1", w.LEG_FULL, 30)
        await s.until(lambda: len(s.tokens["r1"]) > 2)
        look = await s.control.become(D0, RoleName.PREFILL)
        assert (look.state, look.target) == (WorkerState.DRAINING, RoleName.PREFILL)
        undone = s.control.uncordon(D0) if by == "uncordon" else s.control.become(D0, RoleName.DECODE)
        look = await undone
        assert (look.state, look.target) == (WorkerState.READY, None)
        await s.until(lambda: len(s.tokens["r1"]) == 30)
        await s.ask("r2", w.LEG_FULL, 5)
        await s.until(lambda: len(s.tokens["r2"]) == 5)
        assert s.tokens["r1"] == oracle(30)
        assert await s.control.look(D0) == before
        assert not s.is_over


async def test_a_role_that_cannot_be_registered(folder: Path) -> None:
    """The worker keeps its incarnation and its stream; a late write in the registry is put right."""
    async with scene(folder) as s:
        before = await s.control.look(D0)
        os.kill(s.server.pid, signal.SIGSTOP)
        try:
            await s.control.become(D0, RoleName.PREFILL)
            await s.acknowledge()
            look = await s.until_look(lambda look: look.flip_failure)
            assert "prefill" in look.flip_failure
            assert (look.role, look.incarnation, look.flips) == (RoleName.DECODE, before.incarnation, 0)
            await s.until_look(lambda look: look.state is WorkerState.READY)
            await s.ask("r1", w.LEG_FULL, 5)
            await s.until(lambda: len(s.tokens["r1"]) == 5)
        finally:
            os.kill(s.server.pid, signal.SIGCONT)
        await s.until_recorded(role="decode", incarnation=before.incarnation, state="ready")
        beat = await s.redis.hget(KEYS.lease(Member.WORKER, D0), "beat")

        async def is_beating() -> bool:
            return await s.redis.hget(KEYS.lease(Member.WORKER, D0), "beat") != beat

        await wait_for_async(is_beating)
        await s.until_recorded(role="decode", incarnation=before.incarnation, state="ready")
        await s.ask("r2", w.LEG_FULL, 5)
        await s.until(lambda: len(s.tokens["r2"]) == 5)
        assert not s.is_over
        await s.control.become(D0, RoleName.PREFILL)
        s.states = s.states[-1:]
        await s.until(lambda: s.states[-1].state == "draining")
        await s.acknowledge()
        look = await s.until_look(lambda look: look.flips)
        assert (look.role, look.flip_failure) == (RoleName.PREFILL, "")


@pytest.mark.parametrize("moment", [WorkerState.DRAINING, WorkerState.FLIPPING])
async def test_a_worker_that_is_stopped_in_the_middle_and_wakes_up(folder: Path, moment: WorkerState) -> None:
    """SIGSTOP beyond the lease, while it drains or while it registers; after SIGCONT what it was before is refused
    everywhere, and it is one worker with one role."""
    async with scene(folder) as s:
        before = (await s.control.look(D0)).incarnation
        await s.ask("r1", w.LEG_FULL, 5 if moment is WorkerState.FLIPPING else 2000)
        await s.until(lambda: len(s.tokens["r1"]) >= 5)
        await wait_for_async(lambda: s.redis.scard(KEYS.blocks(D0, before)))
        if moment is WorkerState.FLIPPING:
            os.kill(s.server.pid, signal.SIGSTOP)
            await until_it_registers(s, RoleName.PREFILL)
        else:
            await s.control.become(D0, RoleName.PREFILL)
        s.signal(signal.SIGSTOP)
        stopped_s = time.monotonic()
        try:
            if moment is WorkerState.FLIPPING:
                os.kill(s.server.pid, signal.SIGCONT)
            await wait_for_async(lambda: time.monotonic() - stopped_s > LEASE_S + 0.5, what="it lapsed by any clock")
            await wait_for_async(lambda: _is_gone(s.redis))
            published = await s.redis.xlen(KEYS.events(D0, before))
        finally:
            s.signal(signal.SIGCONT)
        await s.until(lambda: s.is_over)
        await s.at.close()
        look = await s.until_settled(lambda look: look.role is RoleName.PREFILL or look.flip_failure)
        assert look.incarnation != before
        assert look.role is RoleName.PREFILL or moment is WorkerState.FLIPPING
        await is_fenced(s, before)
        assert await s.redis.xlen(KEYS.events(D0, before)) in (0, published), "expired, or as it was"
        await s.meet()
        await s.ask("r2", w.LEG_FULL, 1)
        await s.until(lambda: s.tokens["r2"])
        assert (s.tokens["r2"], s.cached["r2"]) == (oracle(1), 96)
        assert await s.control.look(D0) == look


async def until_it_registers(s: Scene, role: RoleName) -> None:
    """In this role, with a registry that stands still. It gives up soon, and is asked again until it is met before."""
    while True:
        sequence = s.states[-1].sequence if s.states else 0
        await s.control.become(D0, role)
        await s.until(lambda sequence=sequence: s.states and s.states[-1].sequence > sequence)
        await s.acknowledge()
        look = await s.until_look(lambda look: look.state is WorkerState.FLIPPING or look.flip_failure)
        if look.state is WorkerState.FLIPPING:
            return
        await s.until_look(lambda look: look.state is WorkerState.READY)


async def _is_gone(redis: Redis) -> bool:
    return not await redis.exists(KEYS.lease(Member.WORKER, D0))


async def is_fenced(s: Scene, incarnation: Incarnation) -> None:
    """No client can address the worker as that incarnation any more."""
    async with grpc.aio.insecure_channel(s.address) as channel:
        stub: Any = worker_pb2_grpc.WorkerStub(channel)
        for method, call_of, hello in (
            (
                STREAM,
                stub.Stream,
                w.RouterMessage(
                    hello=w.RouterHello(router="x", worker_incarnation=incarnation, protocol=STREAM_VERSION)
                ),
            ),
            (
                PEER,
                stub.Peer,
                w.PeerMessage(hello=w.PeerHello(worker="p9", incarnation=1, peer_incarnation=incarnation)),
            ),
        ):
            # Meant for that incarnation, or for the present one, but addressed to that one.
            now = (await s.control.look(D0)).incarnation
            for meant, why in ((incarnation, "this is d0/"), (now, "this worker is")):
                proof = CallProof.of(s.secret, method, stream_target(D0, meant))
                call = call_of(metadata=proof.metadata)
                if len(await call.initial_metadata()):  # else it is refused, and a write would hide why
                    await call.write(hello)
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await asyncio.wait_for(call.read(), 60)
                assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
                assert why in str(refused.value.details())


async def test_who_may_not_and_who_is_not_meant(folder: Path) -> None:
    async with scene(folder) as s:
        with pytest.raises(AuthError):
            await WorkerControlClient(ClusterSecret.generate(), lambda _: s.address).drain(D0)
        with pytest.raises(NotFoundError, match="this is d0"):
            await s.control.drain(WorkerId("d1"))
        with pytest.raises(UnavailableError, match="was not reached"):
            await WorkerControlClient(s.secret, lambda _: "127.0.0.1:1").drain(D0)
        async with grpc.aio.insecure_channel(s.address) as channel:
            stub: Any = worker_pb2_grpc.WorkerStub(channel)
            cook = c.ControlRequest(worker="d0", become=c.BecomeOrder(role="cook"))
            for order in (cook, c.ControlRequest(worker="d0")):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await stub.Control(order, metadata=CallProof.of(s.secret, CONTROL, D0).metadata, timeout=20)
                assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (await s.control.look(D0)).state is WorkerState.READY
