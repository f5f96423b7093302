"""A prefill and a decode rank in one process: real engines, roles, step loops and transports, no hosts and no gRPC.

What hosts would carry is carried by hand, so a test can look into both pools, drop or reorder messages, and stop time.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tandem.core import kv_compatibility
from tandem.core.clock import MonotonicClock
from tandem.core.config import WorkerConfig, WorkerSection
from tandem.core.ids import WorkerId, new_incarnation
from tandem.core.secret import ClusterSecret
from tandem.core.state_enums import RoleName
from tandem.kvtransfer.host_id import host_id
from tandem.rpc.v1 import engine_pb2 as e
from tandem.rpc.v1 import generation_pb2 as g
from tandem.rpc.v1 import worker_pb2 as w
from tandem.worker.engine_loading import kv_profile, load_engine, open_transfer_ends
from tandem.worker.rank import create_role
from tandem.workercore.heartbeat import Pulse
from tandem.workercore.inbox import Inbox
from tandem.workercore.message_ring import RingHandle, RingReader, RingWriter
from tandem.workercore.outbox import Outbox
from tandem.workercore.requests import RequestTable
from tandem.workercore.role_interface import RoleContext
from tandem.workercore.step_loop import StepLoop


class Rank:
    """One worker's rank 0 without its host."""

    def __init__(
        self,
        name: str,
        role: RoleName,
        folder: Path,
        model: Path,
        protocol: tuple[int, int] = kv_compatibility.PROTOCOL,
        **settings: Any,
    ) -> None:
        config = WorkerConfig(
            cluster="test",
            worker_id=name,
            role=role,
            pool=role.value,
            model=model.name,
            model_dir=str(model),
            revision="",
            dtype=settings.pop("dtype", "float32"),
            max_model_len=settings.pop("max_model_len", 0),
            redis_url="",
            secret_file=str(folder / "secret"),
            runtime_dir=str(folder / name),
            settings=dataclasses.replace(WorkerSection(threads=1, kv_memory_bytes=64 << 20), **settings),
        )
        (folder / name).mkdir()
        self.name, self.incarnation = name, new_incarnation()
        self.sent: list[e.RankToHost] = []
        self._ring = RingHandle.create(f"test-{name}")
        self._writer = RingWriter(self._ring)
        self.inbox = Inbox.open(RingReader(self._ring))
        self._pulse = Pulse.create(f"test-{name}")
        loaded = load_engine(config)
        receiver, sender = open_transfer_ends(config, loaded, self.inbox.post)
        receiver.set_incarnation(self.incarnation)
        sender.set_incarnation(self.incarnation)
        self.pools, self.sender = loaded.pools, sender
        self.context = RoleContext(
            worker=WorkerId(name),
            incarnation=self.incarnation,
            profile=dataclasses.replace(kv_profile(loaded, receiver, config.settings), protocol=protocol),
            host=host_id(),
            engine=loaded.engine,
            receiver=receiver,
            sender=sender,
            requests=RequestTable(5.0),
            outbox=Outbox(lambda data: self.sent.append(e.RankToHost.FromString(data))),
            clock=MonotonicClock(),
        )
        self.role = create_role(role, self.context)
        self.loop = StepLoop(self.context, self.role, self.inbox, self._pulse)

    @property
    def ref(self) -> w.WorkerRef:
        return w.WorkerRef(worker=self.name, incarnation=self.incarnation, address="loopback")

    def deliver(self, message: e.HostToRank) -> None:
        assert self._writer.try_write(message.SerializeToString())

    def from_router(self, **kind: Any) -> None:
        self.deliver(e.HostToRank(router=e.FromRouter(router="test", message=w.RouterMessage(**kind))))

    def is_at_rest(self) -> bool:
        engine = self.context.engine
        return self.loop.is_idle() and not engine.has_work and len(self.context.requests) == 0

    def check_baseline(self) -> None:
        """Nothing is held: every block is free or cached."""
        self.context.engine.scheduler.check_integrity()
        for ledger in self.context.engine.ledgers:
            assert ledger.holders() == {}, ledger.holders()

    def close(self) -> None:
        self.context.sender.close()
        self.context.receiver.close()
        self.inbox.close()
        self._writer.close()
        self._ring.close()
        self._pulse.close()


class Loopback:
    """Carries messages between the two ranks and collects what the router would get."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        prefill: dict[str, Any] | None = None,
        decode: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        """`prefill` and `decode`: what either does differently from `settings`."""
        ClusterSecret.generate().save(folder / "secret")
        self.p = Rank("p0", RoleName.PREFILL, folder, model, **{**settings, **(prefill or {})})
        self.d = Rank("d0", RoleName.DECODE, folder, model, **{**settings, **(decode or {})})
        self.chunks: dict[str, dict[int, list[w.TokenChunk]]] = defaultdict(lambda: defaultdict(list))
        self.failed: dict[str, list[w.RequestFailed]] = defaultdict(list)
        self.prompts: dict[str, list[w.PromptChunk]] = defaultdict(list)

    def submit(
        self,
        request: str,
        prompt: list[int],
        attempt: int = 1,
        forced: Sequence[g.ChoiceState] = (),
        is_whole: bool = False,
        salt: bytes = b"",
        trace: str = "",
        **sampling: Any,
    ) -> None:
        values = {"max_tokens": 8, "n": 1, "temperature": 0.0, "top_p": 1.0, "repetition_penalty": 1.0, **sampling}
        common: dict[str, Any] = {
            "request": request,
            "attempt": attempt,
            "prompt": prompt,
            "sampling": g.SamplingParams(**values),
            "timeout_s": 60,
            "forced": forced,
            "salt": salt,
            "trace": trace,
        }
        if is_whole:  # the decode worker prefills it itself
            self.d.from_router(submit=w.Submit(leg=w.LEG_FULL, **common))
            return
        self.d.from_router(submit=w.Submit(leg=w.LEG_DECODE, peer=self.p.ref, **common))
        self.p.from_router(submit=w.Submit(leg=w.LEG_PREFILL, peer=self.d.ref, **common))

    def cancel(self, request: str, attempt: int = 1) -> None:
        for rank in (self.p, self.d):
            rank.from_router(cancel=w.Cancel(request=request, attempt=attempt, reason="the client left"))

    def turn(self) -> None:
        """Run one turn of each loop, then carry their messages."""
        for rank in (self.p, self.d):
            rank.loop.turn(max_wait_s=0.002)
            self.carry(rank)

    def carry(self, rank: Rank) -> None:
        other = self.d if rank is self.p else self.p
        for message in rank.sent:
            if message.HasField("peer"):
                stamped = e.FromPeer(
                    worker=rank.name,
                    incarnation=rank.incarnation,
                    message=message.peer.message,
                    received_s=rank.context.clock.now_s(),
                )
                other.deliver(e.HostToRank(peer=stamped))
            elif message.HasField("router"):
                self._collect(message.router.message)
        rank.sent.clear()

    def run_until_rest(self, max_turns: int = 100_000) -> None:
        for _ in range(max_turns):
            self.turn()
            if self.p.is_at_rest() and self.d.is_at_rest():
                return
        raise AssertionError("the pair does not come to rest")

    def rest_at_baseline(self, max_turns: int = 10_000) -> None:
        """Run until nothing happens; then nothing may be held."""
        self.run_until_rest(max_turns)
        self.p.check_baseline()
        self.d.check_baseline()

    def tokens(self, request: str, choice: int = 0) -> list[int]:
        """Output tokens in index order; each index must have come exactly once, without gaps."""
        chunks = sorted(self.chunks[request][choice], key=lambda chunk: chunk.index)
        first = chunks[0].index if chunks else 0
        assert [chunk.index for chunk in chunks] == list(range(first, first + len(chunks)))
        return [token for chunk in chunks for token in chunk.tokens]

    def _collect(self, message: w.WorkerMessage) -> None:
        for prompt in message.tokens.prompts:
            self.prompts[prompt.request].append(prompt)
        for chunk in message.tokens.chunks:
            self.chunks[chunk.request][chunk.choice].append(chunk)
        if message.HasField("failed"):
            self.failed[message.failed.request].append(message.failed)

    def close(self) -> None:
        self.p.close()
        self.d.close()


def prompt_of(tokens: int, seed: int = 7) -> list[int]:
    """Token ids, unlike those of another seed from the first block on."""
    return [(seed * i * i + 31 * i) % 4000 + 10 for i in range(tokens)]


def forward(pair: Loopback, rank: Rank, kind: str, change: Callable[[Any], None]) -> None:
    """Run until `rank` sends `kind` to its peer, and carry that message changed."""
    for _ in range(500):
        for one in (pair.p, pair.d):
            one.loop.turn(max_wait_s=0.002)
            said = [m for m in one.sent if m.HasField("peer") and m.peer.message.WhichOneof("kind") == kind]
            for message in said:
                change(getattr(message.peer.message, kind))
            pair.carry(one)
            if said and one is rank:
                return
    raise AssertionError(f"{rank.name} never said {kind}")
