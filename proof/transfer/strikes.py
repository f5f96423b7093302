"""Plan of one kill or stop, drawn from seed and index alone, and the real pair of workers that it happens to."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proof.transfer.asks import Ask
from proof.transfer.partner import Partner
from proof.transfer.plan import TRANSPORTS
from tandem.core.config import SimSection
from tandem.core.secret import ClusterSecret
from tandem.core.state_enums import RoleName
from tandem.rpc.v1 import worker_pb2 as w
from tests.integration.worker.pair import MODEL, start_worker

MOMENTS = ("queued", "ticket asked", "pushing", "mid-copy", "complete", "verified", "decoding")
GROUP = 20
"""So many strikes in a row have the same transport and TP; survivors are kept among them."""
SHAPE_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """The pair of a group. `prefill_rate`: tokens a second, 0 = as fast as it can."""

    transport: str
    p_tp: int
    d_tp: int
    prefill_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """`victim`: "p" or "d". `target`: −1 = its host, else a rank. `delay`: from 0 to 1, after the moment has come.

    `wakes`: a stopped worker goes on when all others have given it up.
    """

    name: str
    ends: Ends
    is_stop: bool
    victim: str
    target: int
    moment: str
    delay: float
    wakes: bool
    seed: str


def draw_strike(seed: int, part: str, index: int) -> Strike:
    """The strike of this number; `part` is "kills" or "stops"."""
    group = random.Random(f"{seed}/{part}/group {index // GROUP}")
    number = index // GROUP
    ends = Ends(
        transport=TRANSPORTS[number % len(TRANSPORTS)],
        p_tp=group.choice((1, 1, 2)),
        d_tp=group.choice((1, 1, 2)),
        prefill_rate=group.choice((0.0, 6000.0)),
    )
    rng = random.Random(f"{seed}/{part}/{index}")
    victim = rng.choice("pd")
    tp = ends.p_tp if victim == "p" else ends.d_tp
    return Strike(
        name=f"{part}/{index}",
        ends=ends,
        is_stop=part == "stops",
        victim=victim,
        target=rng.choice((-1, *range(tp))),
        moment=MOMENTS[index % len(MOMENTS)],
        delay=rng.random(),
        wakes=rng.random() < 0.5,
        seed=f"{seed}/{part}/{index}",
    )


class House:
    """One pair of workers at a time, behind a router that is this process. Workers are kept while they fit."""

    def __init__(self, folder: Path, redis_url: str, number: int) -> None:
        self._folder, self._redis_url, self._number = folder, redis_url, number
        folder.mkdir()
        self.secret = ClusterSecret.generate()
        self.secret.save(folder / "secret")
        self.model = folder / "tandem-tiny"
        self.model.mkdir()
        for name in SHAPE_FILES:
            shutil.copy(MODEL / name, self.model / name)
        self.asks: dict[str, Ask] = {}
        self.heard: Callable[[], None] = lambda: None
        self._ends: Ends | None = None
        self._started = 0
        self.workers: dict[str, Partner] = {}

    async def prepare(self, ends: Ends, spare: str) -> Partner:
        """Have a pair of these ends, and a spare worker of one role. Raises RuntimeError where one does not start."""
        if self._ends != ends:
            await self.clear()
            self._ends = ends
        for side in "pd":
            if side not in self.workers:
                self.workers[side] = await self._start(side)
        return await self._start(spare)

    async def clear(self) -> None:
        """Take all workers down."""
        await asyncio.gather(*(worker.end() for worker in self.workers.values()))
        self.workers.clear()

    async def _start(self, side: str) -> Partner:
        assert self._ends is not None
        self._started += 1
        tp = self._ends.p_tp if side == "p" else self._ends.d_tp
        settings: dict[str, Any] = {
            "engine": "sim",
            "tp": tp,
            "transport": self._ends.transport,
            "transports": (self._ends.transport,),
            "sim": SimSection(prefill_tokens_per_s=self._ends.prefill_rate, decode_step_s=0.01),
            "kv_memory_bytes": ((17 << 19) if side == "d" else (16 << 20)) // tp,
            "chunk_tokens": 64,
            "max_model_len": 1600,
        }
        role = RoleName.PREFILL if side == "p" else RoleName.DECODE
        name = f"{side}{self._number}-{self._started}"
        running = await start_worker(self._folder, name, role, self._redis_url, self.model, **settings)
        partner = Partner(running, tp, self._take)
        await partner.open(self.secret)
        return partner

    async def submit(self, ask: Ask) -> None:
        """To both workers, as a router does; whole on the decode worker if that is its leg."""
        self.asks[ask.id] = ask
        p, d = self.workers["p"], self.workers["d"]
        if ask.leg == w.LEG_FULL:
            await d.send(submit=ask.submit(w.LEG_FULL, None))
            return
        await d.send(submit=ask.submit(w.LEG_DECODE, p.ref))
        await p.send(submit=ask.submit(w.LEG_PREFILL, d.ref))

    def _take(self, worker: Partner, message: w.WorkerMessage) -> None:
        for chunk in message.tokens.chunks:
            if chunk.request in self.asks:
                self.asks[chunk.request].take(worker.name, chunk)
        if message.HasField("failed") and message.failed.request in self.asks:
            self.asks[message.failed.request].fail(worker.name, message.failed)
        if message.HasField("phase") and message.phase.request in self.asks:
            ask = self.asks[message.phase.request]
            if message.phase.attempt == ask.attempt:
                ask.phases.setdefault((worker.name[0], message.phase.phase), asyncio.get_running_loop().time())
        self.heard()
