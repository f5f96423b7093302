"""Ranks of any roles in one process, with the simulated engine, that hand over to and fetch blocks from each other.

Messages that hosts would carry are carried by hand: a test may lose, hold back, repeat or change workers' messages,
stop a worker, and set the clock forward.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tandem.core.clock import MonotonicClock
from tandem.core.ledger import HoldKind, subject_of
from tandem.core.secret import ClusterSecret
from tandem.core.state_enums import RoleName
from tandem.engine.sim.arithmetic import expected_tokens
from tandem.rpc.v1 import engine_pb2 as e
from tandem.rpc.v1 import generation_pb2 as g
from tandem.rpc.v1 import worker_pb2 as w
from tests.integration.worker.loopback import Rank
from tests.integration.worker.pair import shape_in

BLOCK_BYTES = 16 * 5120
"""Of the bundled model's shape in float32."""
ROLES = {"p": RoleName.PREFILL, "d": RoleName.DECODE, "m": RoleName.MIXED}
Fate = Callable[[Rank, w.PeerMessage], int]
"""How often a rank's message to another one arrives: 0 = lost, 2 = twice."""


def losing(*kinds: str) -> Fate:
    """Messages of these kinds get lost."""
    return lambda rank, message: int(message.WhichOneof("kind") not in kinds)


class MovedClock:
    """The machine's clock, set forward by `skip`: leases lapse without a wait."""

    def __init__(self) -> None:
        self._real, self._ahead_s = MonotonicClock(), 0.0

    def now_s(self) -> float:
        return self._real.now_s() + self._ahead_s

    def skip(self, seconds: float) -> None:
        self._ahead_s += seconds


class Trio:
    """`names` begin with their role's letter. `own` is what some of the ranks have besides `settings`.

    Ranks in `stalled` get no turn, those in `dead` nothing at all.
    """

    def __init__(
        self, folder: Path, names: Sequence[str], own: dict[str, dict[str, Any]] | None = None,
        model: Path | None = None, **settings: Any,
    ) -> None:  # fmt: skip
        """`model`: a folder with weights, for the engine that computes; by default the bundled one's shape."""
        ClusterSecret.generate().save(folder / "secret")
        shape = model or shape_in(folder / "tandem-tiny")
        common = {"engine": "sim", "transport": "shm", "chunk_tokens": 64, "max_model_len": 1024}
        common |= {"kv_memory_bytes": 128 * BLOCK_BYTES}
        self.clock = MovedClock()
        self.ranks: dict[str, Rank] = {}
        for name in names:
            rank = Rank(name, ROLES[name[0]], folder, shape, **{**common, **settings, **(own or {}).get(name, {})})
            rank.context.clock = self.clock
            self.ranks[name] = rank
        self.stalled: set[str] = set()
        self.dead: set[str] = set()
        self.fate: Fate = losing()
        self.said: list[tuple[str, str, w.PeerMessage]] = []
        self.got: dict[str, dict[int, int]] = defaultdict(dict)
        self.cached: dict[str, int] = {}
        self.failed: dict[str, list[w.RequestFailed]] = defaultdict(list)

    def __getitem__(self, name: str) -> Rank:
        return self.ranks[name]

    def submit(
        self,
        request: str,
        prompt: Sequence[int],
        at: str,
        decode: str = "",
        *,
        sources: Sequence[tuple[str, int]] = (),
        attempt: int = 1,
        forced: Sequence[g.ChoiceState] = (),
        lossy: str = "",
        timeout_s: float = 600,
        **sampling: Any,
    ) -> None:
        """Whole at `at`; or prefilled there and decoded at `decode`. `sources`: (worker, tokens announced as held)."""
        values = {"max_tokens": 4, "n": 1, "temperature": 0.0, "top_p": 1.0, "repetition_penalty": 1.0}
        common: dict[str, Any] = {
            "request": request,
            "attempt": attempt,
            "prompt": prompt,
            "sampling": g.SamplingParams(**{**values, "ignore_eos": True, **sampling}),
            "timeout_s": timeout_s,
            "forced": forced,
        }
        advice = [w.PrefixSource(worker=self[name].ref, tokens=tokens, lossy=lossy) for name, tokens in sources]
        if not decode:
            self[at].from_router(submit=w.Submit(leg=w.LEG_FULL, sources=advice, **common))
            return
        self[decode].from_router(submit=w.Submit(leg=w.LEG_DECODE, peer=self[at].ref, **common))
        self[at].from_router(submit=w.Submit(leg=w.LEG_PREFILL, peer=self[decode].ref, sources=advice, **common))

    def serve(self, request: str, prompt: Sequence[int], at: str, decode: str = "", **options: Any) -> None:
        """Submit it, and run until nothing happens any more."""
        self.submit(request, prompt, at, decode, **options)
        self.run_until_rest()

    def cancel(self, request: str, attempt: int = 1) -> None:
        for rank in self.ranks.values():
            rank.from_router(cancel=w.Cancel(request=request, attempt=attempt, reason="a test"))

    def gone(self, name: str, *, told: Sequence[str] = ()) -> None:
        """The worker is dead: its links break, its peers learn it, and it sends and receives nothing any more."""
        self.dead.add(name)
        self[name].context.sender.close()
        self[name].context.receiver.close()
        for other in told or [other for other in self.ranks if other != name]:
            gone = e.PeerGone(worker=name, incarnation=self[name].incarnation, reason="killed")
            self[other].deliver(e.HostToRank(peer_gone=gone))

    def turn(self, times: int = 1) -> None:
        for rank in [*self.ranks.values()] * times:
            if rank.name not in self.stalled | self.dead:
                rank.loop.turn(max_wait_s=0.001)
                _check_held(rank)
                self._carry(rank)

    def run_until(self, condition: Callable[[], object], max_turns: int = 4000) -> None:
        for _ in range(max_turns):
            if condition():
                return
            self.turn()
        raise AssertionError(f"not within {max_turns} turns")

    def run_until_rest(self) -> None:
        self.turn()
        self.run_until(lambda: all(r.is_at_rest() for r in self.ranks.values() if r.name not in self.dead))

    def rest_at_baseline(self) -> None:
        """Run until nothing happens; then nothing may be held."""
        self.run_until_rest()
        self.check_baseline()

    def has_said(self, name: str, kind: str) -> int:
        return [(who, what) for who, what, _ in self.said].count((name, kind))

    def count(self, name: str, counter: str) -> float:
        return self[name].context.counters.get(counter, 0.0)

    def tokens(self, request: str) -> list[int]:
        got = self.got[request]
        first = min(got, default=0)
        assert sorted(got) == list(range(first, first + len(got))), got
        return [got[index] for index in sorted(got)]

    def check(self, request: str, prompt: Sequence[int], count: int = 4, outputs: Sequence[int] = ()) -> None:
        """The request answered with the oracle's tokens, and no live rank holds anything."""
        assert not self.failed[request], self.failed[request]
        assert self.tokens(request) == expected_tokens(prompt, count, 4096, eos_token_ids=(1,), outputs=outputs)
        self.check_baseline()

    def check_baseline(self) -> None:
        for rank in self.ranks.values():
            if rank.name not in self.dead:
                rank.check_baseline()
                assert rank.loop.claims() == []
                assert len(rank.context.leases) == 0

    def deliver(self, source: Rank, target: Rank, message: w.PeerMessage) -> None:
        stamped = e.FromPeer(
            worker=source.name, incarnation=source.incarnation, message=message, received_s=self.clock.now_s()
        )
        target.deliver(e.HostToRank(peer=stamped))

    def _carry(self, rank: Rank) -> None:
        sent, rank.sent[:] = list(rank.sent), []
        for message in sent:
            if message.HasField("peer"):
                said = message.peer.message
                self.said.append((rank.name, str(said.WhichOneof("kind")), said))
                target = self[message.peer.worker]
                if target.name in self.dead:
                    continue
                for _ in range(self.fate(rank, said)):
                    self.deliver(rank, target, said)
            elif message.HasField("router"):
                self._collect(message.router.message)

    def _collect(self, message: w.WorkerMessage) -> None:
        for chunk in message.tokens.chunks:
            if chunk.HasField("cached_tokens"):
                self.cached[chunk.request] = chunk.cached_tokens
            for offset, token in enumerate(chunk.tokens):
                assert chunk.index + offset not in self.got[chunk.request], "a token came twice"
                self.got[chunk.request][chunk.index + offset] = token
        if message.HasField("failed"):
            self.failed[message.failed.request].append(message.failed)

    def close(self) -> None:
        for rank in self.ranks.values():
            rank.close()


class Crowd(Trio):
    """Prefill ranks p0, p1, …, and a small decode rank d0."""

    def __init__(self, folder: Path, prefills: int, *, d_blocks: int, p_blocks: int = 64, **settings: Any) -> None:
        names = [*(f"p{number}" for number in range(prefills)), "d0"]
        common = {"chunk_tokens": 32, "max_model_len": 160, "kv_memory_bytes": p_blocks * BLOCK_BYTES}
        super().__init__(folder, names, {"d0": {"kv_memory_bytes": d_blocks * BLOCK_BYTES}}, **(common | settings))
        self.d, self.ps = self["d0"], [self[name] for name in names[:-1]]
        self.asked: dict[str, tuple[list[int], int]] = {}

    def ask(self, request: str, prefill: int, prompt: list[int], max_tokens: int = 4) -> None:
        self.asked[request] = (prompt, max_tokens)
        self.submit(request, prompt, f"p{prefill}", "d0", max_tokens=max_tokens)

    def check_all(self) -> None:
        """Every request that did not fail answered with the oracle's tokens, and nothing is held anywhere."""
        for request, (prompt, max_tokens) in self.asked.items():
            if not self.failed[request]:
                self.check(request, prompt, max_tokens)
        self.check_baseline()


def _check_held(rank: Rank) -> None:
    """Check that readable blocks are pinned and writable blocks are reserved, also after a request gave them up."""
    holders = {h for ledger in rank.context.engine.ledgers for h in ledger.holders()}
    held = {(holder.kind, subject_of(holder).transfer) for holder in holders}
    for kind, end in ((HoldKind.PUSHING, rank.context.sender), (HoldKind.RESERVED, rank.context.receiver)):
        for one in end.transfers():
            assert (kind, one.transfer) in held, f"{rank.name}: transfer {one.transfer} is {one.phase}, nothing is held"
