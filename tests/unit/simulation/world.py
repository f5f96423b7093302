"""Two prefill and two decode workers, a router and everything between them, moved by hand, one event at a time.

Lines   router → worker, worker → router    in order, never lost while the stream stands
        control channels                    in order; a test may lose, double and delay messages
        frames and replies of KV links      a test may lose, double, spoil and reorder them
"""

import functools
import itertools
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.core.clock import ManualClock
from tandem.core.ids import Incarnation
from tandem.core.state_enums import RoleName
from tandem.rpc.v1 import engine_pb2 as e
from tandem.rpc.v1 import worker_pb2 as w
from tests.unit.engine.simulation import layout
from tests.unit.simulation.channels import Channels
from tests.unit.simulation.memory import Network
from tests.unit.simulation.rank import Worker
from tests.unit.simulation.router import TIMEOUT_S, Ask, Flight, Router

ROLES = {"p0": RoleName.PREFILL, "p1": RoleName.PREFILL, "d0": RoleName.DECODE, "d1": RoleName.DECODE}
ROUTER = "router"
ROUND_S = 0.25
AGREED_AFTER_S = 6.0
"""Two words of a peer, a second apart, and a lease between them; or the wait for an announcement."""
CANCELLED_AFTER_S = 2.0
SETTLED_AFTER_S = 2 * TIMEOUT_S


Plan = tuple[str | None, str]
"""Names of a prefill worker (None: the decode worker does it all) and a decode worker."""


@dataclass(frozen=True)
class Line:
    """A queue that can deliver its first item. `is_lossy`: items may also be lost or doubled."""

    name: str
    items: deque[Any]
    deliver: Callable[[Any], None]
    is_lossy: bool


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How small everything is; `decode_blocks` in blocks of 4 tokens, for blocks of any size."""

    prefill_blocks: int = 14
    decode_blocks: int = 10
    decode_block_tokens: int = 4
    """Prefill workers have blocks of 4 tokens."""
    groups: int = 1
    max_payload_bytes: int = 1024


class World:
    """Deterministic: the same calls give the same history."""

    def __init__(self, sizes: Sizes | None = None) -> None:
        self.sizes = sizes or Sizes()
        self.clock = ManualClock(100.0)
        self.network = Network(self.sizes.max_payload_bytes)
        self._incarnations = itertools.count(1)
        self.workers: dict[str, Worker] = {}
        self.channels = Channels(lambda name: self.workers[name].incarnation, self._to_rank, self.clock.now_s)
        self.to_worker: dict[str, deque[w.RouterMessage]] = {name: deque() for name in ROLES}
        self.to_router: dict[str, deque[w.WorkerMessage]] = {name: deque() for name in ROLES}
        self.router = Router(self.sizes.groups, lambda name, message: self.to_worker[name].append(message))
        self.tally: Counter[str] = Counter()
        """Counts of events, by the workers' own counters; complete after `close`."""
        self.retries: dict[str, Callable[[Flight], Plan | None]] = {}
        """Where a request's failed attempt is tried again, or None."""
        self.router.replan = self._replan
        for name in ROLES:
            self._start(name)

    # ---- what can happen -------------------------------------------------------------------------------------------

    def lines(self) -> list[Line]:
        """Everything that waits to be delivered, in a fixed order."""
        found = [Line(f"router→{n}", self.to_worker[n], self._from_router(n), False) for n in ROLES]
        found += [Line(f"{n}→router", self.to_router[n], self._hear(n), False) for n in ROLES]
        for channel in self.channels.all:
            for index, items in enumerate(channel.lines):
                found.append(Line(channel.ends[index], items, self._carry(channel, index), True))
        for wire in self.network.wires:
            found.append(Line("frames", wire.frames, wire.deliver_frame, True))
            if not wire.has_sender_noticed:
                found.append(Line("replies", wire.replies, wire.deliver_reply, False))
        return [line for line in found if line.items]

    def submit(self, ask: Ask, prefill: str | None, decode: str, sources: Sequence[str] = ()) -> Flight:
        """`sources`: workers of which the router believes that they hold the whole prompt."""
        return self.router.submit(ask, *self.refs(prefill, decode), [self.workers[name].ref for name in sources])

    def refs(self, prefill: str | None, decode: str) -> tuple[w.WorkerRef | None, w.WorkerRef]:
        return self.workers[prefill].ref if prefill else None, self.workers[decode].ref

    def turn(self, name: str, hold_back: int = 0) -> None:
        """Run one turn of a worker's loop; its messages lie in its lines afterwards."""
        self.workers[name].turn(hold_back)
        self._collect(name)

    def enabled(self, without: str = "") -> list[Callable[[], None]]:
        """Return every single thing that can happen next without trouble; a worker can always take a turn. `without`: a
        worker that stands still, and its router's lines with it."""
        ready: list[Callable[[], None]] = [functools.partial(self.turn, name) for name in ROLES if name != without]
        ready += [link.step for link in self.network.ready_links()]
        lines = [line for line in self.lines() if not without or without not in line.name]
        return ready + [functools.partial(_deliver_first, line) for line in lines] + self.unnoticed()

    def register_anew(self, name: str) -> None:
        """The worker's lease had lapsed: it is another incarnation now, on the same KV links."""
        worker = self.workers[name]
        worker.incarnation = Incarnation(next(self._incarnations))
        self.channels.close_all(name)
        self._cut_router(name)
        worker.pulse.grant(0.0)
        worker.mail.messages.append(e.HostToRank(incarnation=e.NewIncarnation(incarnation=worker.incarnation)))

    def restart(self, name: str) -> None:
        """The worker is killed, and another one with its name takes its place."""
        self._collect(name)
        self._retire(self.workers[name])
        self.channels.close_all(name, is_dead=True)
        self.to_router[name].clear()
        self._cut_router(name, is_dead=True)
        self._start(name)

    def cut_channel(self, index: int) -> None:
        """One control channel breaks; its ends notice later."""
        whole = [channel for channel in self.channels.all if not channel.is_cut]
        if whole:
            whole[index % len(whole)].cut()

    def cut_wire(self, index: int) -> None:
        """One KV link breaks; its ends notice later."""
        wires = [wire for wire in self.network.wires if not wire.is_cut]
        if wires:
            wires[index % len(wires)].cut("a test cut it")

    def notice(self, index: int) -> None:
        """One end of a cut link or channel notices."""
        ends = self.unnoticed()
        if ends:
            ends[index % len(ends)]()

    def unnoticed(self) -> list[Callable[[], None]]:
        """Return the actions of each end of a broken link or channel once it notices."""
        ends: list[Callable[[], None]] = [
            functools.partial(self.channels.notice, channel, end) for channel, end in self.channels.unnoticed()
        ]
        for wire in self.network.wires:
            if wire.is_cut and not wire.has_receiver_noticed:
                ends.append(wire.receiver_notices)
            if wire.is_cut and not wire.has_sender_noticed:
                ends.append(wire.sender_notices)
        return ends

    def cut_router(self, name: str) -> None:
        """The router's stream to a worker breaks."""
        self._cut_router(name)

    # ---- what must hold --------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Between any two events."""
        for worker in self.workers.values():
            worker.note_states()
            worker.check()
        self.network.wires = [w for w in self.network.wires if not (w.has_sender_noticed and w.has_receiver_noticed)]
        self.network.links = [link for link in self.network.links if not link.is_over]

    def settle(self, *, by_cancel: bool = False) -> None:
        """No more trouble: within a bounded time all requests end, and nothing is held anywhere.

        First of all both ends of every transfer agree that it is there, within a lease and what it takes to notice.
        `by_cancel`: then all clients leave, and what is left has to be gone within seconds instead of deadlines.
        """
        self.retries.clear()
        for worker in self.workers.values():
            worker.pulse.grant(0.0)
        before = self._claimed()
        for _ in range(int(AGREED_AFTER_S / ROUND_S)):
            self.round()
        self._check_agreement(before)
        if by_cancel:
            for flight in self.router.running:
                self.router.cancel(flight)
        limit_s = CANCELLED_AFTER_S if by_cancel else SETTLED_AFTER_S
        self._run_until(self._is_quiet, "the cluster does not come to rest", limit_s)
        for flight in self.router.flights.values():
            assert flight.outcome, f"{flight.id} has no end"
        for worker in self.workers.values():
            worker.note_states()
            worker.check_baseline()

    def prove_alive(self) -> None:
        """After `settle`: every pair serves a request, without a failure."""
        for prefill, decode in itertools.product(("p0", "p1"), ("d0", "d1")):
            flight = self.submit(Ask(13, branch=3, max_tokens=3), prefill, decode)
            self._run_until(functools.partial(_has_ended, flight), "a healthy pair does not answer", 10.0)
            assert flight.outcome == "finished", f"{prefill} and {decode} do not serve any more"
        self.settle(by_cancel=True)

    def close(self) -> None:
        for worker in self.workers.values():
            self._retire(worker)

    def _retire(self, worker: Worker) -> None:
        self.tally.update({name: round(value) for name, value in worker.context.counters.items()})
        self.tally.update(worker.receiver.counters())
        self.tally.update(outcome for told in worker.outcomes.values() for outcome in told)
        worker.close()

    def round(self) -> None:
        """Everything that can happen happens once, in a fair order, and some time passes."""
        for name in ROLES:
            self.turn(name)
        while self.network.ready_links() or self.lines() or self.unnoticed():
            for link in self.network.ready_links():
                link.step()
            for line in self.lines():
                if line.items:
                    _deliver_first(line)
            for notice in self.unnoticed():
                notice()
        self.check()
        self.clock.advance(ROUND_S)

    # ---- below -----------------------------------------------------------------------------------------------------

    def _replan(self, flight: Flight) -> tuple[w.WorkerRef | None, w.WorkerRef] | None:
        plan = self.retries[flight.id](flight) if flight.id in self.retries else None
        return None if plan is None else self.refs(*plan)

    def _claimed(self) -> set[tuple[str, int]]:
        """Return the workers that work on each transfer."""
        return {(name, claim.transfer) for name, worker in self.workers.items() for claim in worker.loop.claims()}

    def _check_agreement(self, before: set[tuple[str, int]]) -> None:
        """No end works on a transfer of `before` that the other has forgotten."""
        for name, worker in self.workers.items():
            for claim in worker.loop.claims():
                is_new = (name, claim.transfer) not in before
                if is_new or claim.kind == "quiescing" or worker.has_verified(claim.transfer):
                    continue
                peer = self.workers[claim.peer]
                assert claim.peer_incarnation == peer.incarnation, f"{name} works with a past {claim.peer}: {claim}"
                known = {other.transfer for other in peer.loop.claims() if other.kind != "quiescing"}
                assert claim.transfer in known, f"{name} works on what {claim.peer} has forgotten: {claim}"

    def _run_until(self, is_done: Callable[[], bool], otherwise: str, limit_s: float) -> None:
        for _ in range(int(limit_s / ROUND_S)):
            self.round()
            if is_done():
                return
        raise AssertionError(f"{otherwise}: {self.describe()}")

    def _is_quiet(self) -> bool:
        has_work = self.lines() or self.network.ready_links() or self.unnoticed() or self.router.running
        return not has_work and all(worker.is_at_rest for worker in self.workers.values())

    def describe(self) -> str:
        """Describe all unfinished work."""
        parts = [f"{flight.id}#{flight.attempt} runs on {list(flight.legs)}" for flight in self.router.running]
        parts += [f"line {line.name} has {len(line.items)}" for line in self.lines()]
        for name, worker in self.workers.items():
            if not worker.is_at_rest:
                parts.append(
                    f"{name}: {worker.engine.load()}, requests {[t.key for t in worker.context.requests.all()]}"
                )
                parts.append(f"claims {worker.loop.claims()}, idle {worker.loop.is_idle()}")
        return "; ".join(parts)

    def _start(self, name: str) -> None:
        role = ROLES[name]
        is_prefill, sizes = role is RoleName.PREFILL, self.sizes
        blocks = sizes.prefill_blocks if is_prefill else sizes.decode_blocks * 4 // sizes.decode_block_tokens
        shape = layout(groups=sizes.groups, block_tokens=4 if is_prefill else sizes.decode_block_tokens)
        self.workers[name] = Worker(
            name, role, Incarnation(next(self._incarnations)), shape=shape, blocks=blocks,
            network=self.network, clock=self.clock,
        )  # fmt: skip

    def _collect(self, name: str) -> None:
        said = self.workers[name].said
        while said:
            message = said.popleft()
            if message.HasField("peer"):
                self.channels.send(name, message.peer)
            elif message.HasField("router"):
                self.to_router[name].append(message.router.message)

    def _cut_router(self, name: str, *, is_dead: bool = False) -> None:
        self.to_worker[name].clear()
        self.to_router[name].clear()
        if not is_dead:
            self._to_rank(name, e.HostToRank(router_gone=e.RouterGone(router=ROUTER)))
        self.router.lost(name)

    def _to_rank(self, name: str, message: e.HostToRank) -> None:
        self.workers[name].mail.messages.append(message)

    def _from_router(self, name: str) -> Callable[[w.RouterMessage], None]:
        return lambda message: self._to_rank(name, e.HostToRank(router=e.FromRouter(router=ROUTER, message=message)))

    def _hear(self, name: str) -> Callable[[w.WorkerMessage], None]:
        return lambda message: self.router.hear(name, message)

    def _carry(self, channel: Any, index: int) -> Callable[[w.PeerMessage], None]:
        return lambda message: self.channels.carry(channel, index, message)


def _has_ended(flight: Flight) -> bool:
    return bool(flight.outcome)


def _deliver_first(line: Line) -> None:
    line.deliver(line.items.popleft())
