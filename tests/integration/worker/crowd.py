"""Many prefill ranks and one small decode rank in one process, with the simulated engine: answers are the oracle's."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tandem.core.clock import MonotonicClock
from tandem.core.lifecycle import RoleName
from tandem.core.secret import ClusterSecret
from tandem.engine.sim.arithmetic import expected_tokens
from tandem.rpc.v1 import engine_pb2 as e
from tandem.rpc.v1 import generation_pb2 as g
from tandem.rpc.v1 import worker_pb2 as w
from tests.integration.worker.loopback import Rank
from tests.integration.worker.pair import MODEL

BLOCK_BYTES = 16 * 5120
"""Of the bundled model's shape in float32."""


class MovedClock:
    """The machine's clock, set forward by `skip`: leases lapse without a wait."""

    def __init__(self) -> None:
        self._real, self._ahead_s = MonotonicClock(), 0.0

    def now_s(self) -> float:
        return self._real.now_s() + self._ahead_s

    def skip(self, seconds: float) -> None:
        self._ahead_s += seconds


class Crowd:
    """Carries messages between `prefills` ranks and the decode rank `d`. Ranks in `stalled` get no turn."""

    def __init__(self, folder: Path, prefills: int, *, d_blocks: int, p_blocks: int = 64, **settings: Any) -> None:
        ClusterSecret.generate().save(folder / "secret")
        shape = folder / "tandem-tiny"
        shape.mkdir()
        for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
            shutil.copy(MODEL / name, shape / name)
        common = {"engine": "sim", "transport": "shm", "chunk_tokens": 32, "max_model_len": 160} | settings
        self.clock = MovedClock()
        self.d = self._rank("d0", RoleName.DECODE, folder, shape, common | {"kv_memory_bytes": d_blocks * BLOCK_BYTES})
        self.ps = [
            self._rank(f"p{n}", RoleName.PREFILL, folder, shape, common | {"kv_memory_bytes": p_blocks * BLOCK_BYTES})
            for n in range(prefills)
        ]
        self.stalled: set[str] = set()
        self.is_lost: Callable[[Rank, w.PeerMessage], bool] = lambda rank, message: False
        self.said: list[tuple[str, str]] = []
        self.got: dict[str, dict[int, int]] = defaultdict(dict)
        self.finished: set[str] = set()
        self.failed: dict[str, list[w.RequestFailed]] = defaultdict(list)
        self.asked: dict[str, tuple[list[int], int]] = {}

    def _rank(self, name: str, role: RoleName, folder: Path, model: Path, settings: dict[str, Any]) -> Rank:
        rank = Rank(name, role, folder, model, **settings)
        rank.context.clock = self.clock
        return rank

    @property
    def ranks(self) -> list[Rank]:
        return [*self.ps, self.d]

    def submit(self, request: str, prefill: int, prompt: list[int], max_tokens: int = 4) -> None:
        self.asked[request] = (prompt, max_tokens)
        sampling = g.SamplingParams(
            max_tokens=max_tokens, n=1, temperature=0.0, top_p=1.0, repetition_penalty=1.0, ignore_eos=True
        )
        p = self.ps[prefill]
        common: dict[str, Any] = {
            "request": request,
            "attempt": 1,
            "prompt": prompt,
            "sampling": sampling,
            "timeout_s": 600,
        }
        self.d.from_router(submit=w.Submit(leg=w.LEG_DECODE, peer=p.ref, **common))
        p.from_router(submit=w.Submit(leg=w.LEG_PREFILL, peer=self.d.ref, **common))

    def cancel(self, request: str) -> None:
        for rank in self.ranks:
            rank.from_router(cancel=w.Cancel(request=request, attempt=1, reason="a test"))

    def turn(self) -> None:
        for rank in self.ranks:
            if rank.name in self.stalled:
                continue
            rank.loop.turn(max_wait_s=0.001)
            self._carry(rank)

    def run_until(self, condition: Callable[[], bool], max_turns: int = 4000) -> None:
        for _ in range(max_turns):
            self.turn()
            if condition():
                return
        raise AssertionError(f"not within {max_turns} turns")

    def run_until_rest(self) -> None:
        self.run_until(lambda: all(rank.is_at_rest() for rank in self.ranks))

    def has_said(self, rank: Rank, kind: str) -> int:
        return self.said.count((rank.name, kind))

    def check(self) -> None:
        """Every request that did not fail answered with the oracle's tokens, and nothing is held anywhere."""
        for request, (prompt, max_tokens) in self.asked.items():
            if self.failed[request]:
                continue
            got = self.got[request]
            assert sorted(got) == list(range(max_tokens)), (request, got)
            oracle = expected_tokens(prompt, max_tokens, 4096)
            assert [got[index] for index in sorted(got)] == oracle
        for rank in self.ranks:
            rank.check_baseline()

    def _carry(self, rank: Rank) -> None:
        for message in rank.sent:
            if message.HasField("peer"):
                said = message.peer.message
                self.said.append((rank.name, str(said.WhichOneof("kind"))))
                target = next(r for r in self.ranks if r.name == message.peer.worker)
                if not self.is_lost(rank, said):
                    stamped = e.FromPeer(
                        worker=rank.name,
                        incarnation=rank.incarnation,
                        message=said,
                        received_s=self.clock.now_s(),
                    )
                    target.deliver(e.HostToRank(peer=stamped))
            elif message.HasField("router"):
                self._collect(message.router.message)
        rank.sent.clear()

    def _collect(self, message: w.WorkerMessage) -> None:
        for chunk in message.tokens.chunks:
            for offset, token in enumerate(chunk.tokens):
                assert chunk.index + offset not in self.got[chunk.request], "a token came twice"
                self.got[chunk.request][chunk.index + offset] = token
        if message.HasField("failed"):
            self.failed[message.failed.request].append(message.failed)

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
