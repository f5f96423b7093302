"""Ranks of any roles in one process, with the simulated engine, that fetch blocks from each other.

Messages that hosts would carry are carried by hand: a test may lose, hold back, repeat or change workers' messages,
stop a worker, and set the clock forward.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tandem.core.holder_keys import subject_of
from tandem.core.ledger import HoldKind
from tandem.core.lifecycle import RoleName
from tandem.core.secret import ClusterSecret
from tandem.engine.sim.arithmetic import expected_tokens
from tandem.rpc.v1 import engine_pb2 as e
from tandem.rpc.v1 import generation_pb2 as g
from tandem.rpc.v1 import worker_pb2 as w
from tests.integration.worker.crowd import BLOCK_BYTES, MovedClock
from tests.integration.worker.loopback import Rank
from tests.integration.worker.pair import MODEL

ROLES = {"p": RoleName.PREFILL, "d": RoleName.DECODE, "m": RoleName.MIXED}
Fate = Callable[[Rank, w.PeerMessage], int]
"""How often a rank's message to another one arrives: 0 = lost, 2 = twice."""


class Trio:
    """`names` begin with their role's letter. `own` is what some of the ranks have besides `settings`."""

    def __init__(
        self, folder: Path, names: Sequence[str], own: dict[str, dict[str, Any]] | None = None,
        model: Path | None = None, **settings: Any,
    ) -> None:  # fmt: skip
        """`model`: a folder with weights, for the engine that computes; by default the bundled one's shape."""
        ClusterSecret.generate().save(folder / "secret")
        shape = model or folder / "tandem-tiny"
        shape.mkdir(exist_ok=True)
        for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
            if model is None:
                shutil.copy(MODEL / name, shape / name)
        common = {"engine": "sim", "transport": "shm", "chunk_tokens": 64, "max_model_len": 1024}
        common |= {"kv_memory_bytes": 128 * BLOCK_BYTES}
        self.clock = MovedClock()
        self.ranks: dict[str, Rank] = {}
        for name in names:
            rank = Rank(name, ROLES[name[0]], folder, shape, **{**common, **settings, **(own or {}).get(name, {})})
            rank.context.clock = self.clock
            self.ranks[name] = rank
        self.stalled: set[str] = set()
        self.fate: Fate = lambda rank, message: 1
        self.said: list[tuple[str, str, w.PeerMessage]] = []
        self.kept: list[tuple[Rank, Rank, w.PeerMessage]] = []
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

    def cancel(self, request: str, attempt: int = 1) -> None:
        for rank in self.ranks.values():
            rank.from_router(cancel=w.Cancel(request=request, attempt=attempt, reason="a test"))

    def gone(self, name: str, *, told: Sequence[str] = ()) -> None:
        """The worker is dead: its links break, its peers learn it, and it sends and receives nothing any more."""
        self.stalled.add(name)
        self[name].context.sender.close()
        self[name].context.receiver.close()
        for other in told or [other for other in self.ranks if other != name]:
            gone = e.PeerGone(worker=name, incarnation=self[name].incarnation, reason="killed")
            self[other].deliver(e.HostToRank(peer_gone=gone))

    def turn(self) -> None:
        for rank in self.ranks.values():
            if rank.name not in self.stalled:
                rank.loop.turn(max_wait_s=0.001)
                _check_held(rank)
                self._carry(rank)

    def run_until(self, condition: Callable[[], bool], max_turns: int = 4000) -> None:
        for _ in range(max_turns):
            if condition():
                return
            self.turn()
        raise AssertionError(f"not within {max_turns} turns")

    def run_until_rest(self) -> None:
        self.turn()
        self.run_until(lambda: all(r.is_at_rest() for r in self.ranks.values() if r.name not in self.stalled))

    def has_said(self, name: str, kind: str) -> bool:
        return any(who == name and what == kind for who, what, _ in self.said)

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
            if rank.name not in self.stalled:
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
                if target.name in self.stalled:
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


def _check_held(rank: Rank) -> None:
    """Check that readable blocks are pinned and writable blocks are reserved, also after a request gave them up."""
    holders = {h for ledger in rank.context.engine.ledgers for h in ledger.holders()}
    held = {(holder.kind, subject_of(holder).transfer) for holder in holders}
    for kind, end in ((HoldKind.PUSHING, rank.context.sender), (HoldKind.RESERVED, rank.context.receiver)):
        for one in end.transfers():
            assert (kind, one.transfer) in held, f"{rank.name}: transfer {one.transfer} is {one.phase}, nothing is held"
