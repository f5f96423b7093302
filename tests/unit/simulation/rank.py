"""One worker without processes, sockets and threads: a simulated engine, real roles, step loop and transfer ends."""

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from tandem.core.clock import ManualClock
from tandem.core.ids import BlockId, GroupId, Incarnation, Rank, TransferId, WorkerId
from tandem.core.kv_compatibility import KVProfile
from tandem.core.kv_layout import KVGroupSpec, KVLayout
from tandem.core.ledger import BlockLedger, Holder, HoldKind, subject_of
from tandem.core.secret import ClusterSecret
from tandem.core.state_enums import RoleName
from tandem.decode_worker.role import DecodeRole
from tandem.engine.engine import Engine
from tandem.engine.sim.runner import SimRunner
from tandem.engine.step_budget import SchedulerConfig
from tandem.kvtransfer.events import Failed, Verified
from tandem.kvtransfer.kv_pool_access import HostPool, TokenRun
from tandem.kvtransfer.receiver import TransferReceiver
from tandem.kvtransfer.sender import TransferSender
from tandem.kvtransfer.state import TransferState
from tandem.prefill_worker.role import PrefillRole
from tandem.rpc.v1 import engine_pb2 as e
from tandem.rpc.v1 import worker_pb2 as w
from tandem.workercore.heartbeat import Pulse
from tandem.workercore.outbox import Outbox
from tandem.workercore.requests import RequestTable
from tandem.workercore.role_interface import Role, RoleContext
from tandem.workercore.step_loop import StepLoop
from tests.unit.engine.simulation import EOS, VOCAB
from tests.unit.simulation.memory import NAME, Network

SECRET = ClusterSecret.generate()


class Mail:
    """Received messages. The rest of a turn's mail may be held back until the step runs."""

    def __init__(self) -> None:
        self.events: deque[object] = deque()
        self.messages: deque[object] = deque()
        self.hold_back = 0

    def take(self, wait_s: float) -> list[object]:
        items = [*self.events, *self.messages]
        keep = min(self.hold_back, len(items))
        self.hold_back = 0
        self.events.clear()
        self.messages.clear()
        self.messages.extend(items[len(items) - keep :])
        return items[: len(items) - keep]


class WatchedPool:
    """A pool that checks every access against the ledger: a frame lands only in blocks that its transfer alone
    reserved, and is read only from blocks that its push holds."""

    def __init__(self, pool: HostPool, network: Network, ledger: Callable[[], BlockLedger]) -> None:
        self._pool, self._network, self._ledger = pool, network, ledger

    @property
    def spec(self) -> KVGroupSpec:
        return self._pool.spec

    @property
    def tp(self) -> int:
        return self._pool.tp

    def read_into(self, blocks: Sequence[BlockId], layers: range, heads: range, out: memoryview) -> int:
        self._check_read(blocks)
        return self._pool.read_into(blocks, layers, heads, out)

    def read_tokens_into(
        self, source: TokenRun, layers: range, heads: range, out: memoryview, *, target_tokens: int
    ) -> int:
        self._check_read(source.blocks)
        return self._pool.read_tokens_into(source, layers, heads, out, target_tokens=target_tokens)

    def write_from(self, blocks: Sequence[BlockId], layers: range, heads: range, payload: memoryview) -> int:
        frame = self._network.landing
        assert frame is not None, "bytes land that no frame brought"
        for block in blocks:
            owners = [(h.kind, subject_of(h).transfer) for h in self._holders(block)]
            assert owners == [(HoldKind.RESERVED, frame.transfer)], f"a frame lands in a block of {owners}"
        return self._pool.write_from(blocks, layers, heads, payload)

    def _check_read(self, blocks: Sequence[BlockId]) -> None:
        transfer = self._network.reading
        for block in blocks:
            pushers = {subject_of(h).transfer for h in self._holders(block) if h.kind is HoldKind.PUSHING}
            assert transfer in pushers, "a source is read that its push does not hold"

    def _holders(self, block: BlockId) -> list[Holder]:
        return [held.holder for held in self._ledger().held() if block in held.blocks]


class Worker:
    """Rank 0 of a worker. `said` takes messages for its host; everything happens inside `turn`."""

    def __init__(
        self, name: str, role: RoleName, incarnation: Incarnation, *, shape: KVLayout, blocks: int, network: Network,
        clock: ManualClock, chunk_tokens: int = 8, max_sequences: int = 4,
    ) -> None:  # fmt: skip
        self.name, self.incarnation, self.clock = name, incarnation, clock
        self.mail = Mail()
        self.said: deque[e.RankToHost] = deque()
        self.outcomes: dict[tuple[str, TransferId], list[str]] = {}
        self.states: dict[TransferId, TransferState] = {}
        self.runner = SimRunner(
            shape, [blocks] * len(shape.groups), vocab_size=VOCAB, eos_token_ids=EOS, max_model_len=48, layer_group=1,
            clock=clock,
        )  # fmt: skip
        config = SchedulerConfig(max_step_tokens=16, max_sequences=max_sequences, chunk_tokens=chunk_tokens)
        self.engine = Engine(self.runner, config=config, clock=clock)
        pools = {
            GroupId(g): WatchedPool(HostPool(spec, shape.tp, self.runner.pool_bytes(g)), network, self._ledger(g))
            for g, spec in enumerate(shape.groups)
        }
        undo = network.install()
        try:
            self.receiver = TransferReceiver(
                incarnation=incarnation, rank=Rank(0), pools=pools, secret=SECRET,
                runtime_dir=Path("/nowhere"), on_event=self._receiver_event, clock=clock, transports=(NAME,),
            )  # fmt: skip
        finally:
            undo()
        self.receiver.start()
        self.sender = TransferSender(
            worker=WorkerId(name), incarnation=incarnation, rank=Rank(0), pools=pools, secret=SECRET,
            on_event=self._sender_event, clock=clock, link_type=network.link_type(),
        )  # fmt: skip
        self.pulse = Pulse.create(f"machine-{name}")
        self.context = RoleContext(
            worker=WorkerId(name),
            incarnation=incarnation,
            profile=KVProfile(fingerprint="f", identity=(), layout=shape, transports=(NAME,)),
            host="here",
            engine=self.engine,
            receiver=self.receiver,
            sender=self.sender,
            requests=RequestTable(5.0),
            outbox=Outbox(lambda data: self.said.append(e.RankToHost.FromString(data))),
            clock=clock,
        )
        self.role = _create_role(role, self.context)
        self.loop = StepLoop(self.context, self.role, self.mail, self.pulse, _create_role)

    @property
    def ref(self) -> w.WorkerRef:
        return w.WorkerRef(worker=self.name, incarnation=self.incarnation, address=f"at {self.name}")

    @property
    def is_at_rest(self) -> bool:
        has_mail = bool(self.mail.events or self.mail.messages or self.said)
        return not has_mail and self.loop.is_idle() and not self.engine.has_work and len(self.context.requests) == 0

    def turn(self, hold_back: int = 0) -> None:
        """One turn of the step loop; the last `hold_back` pieces of mail come while its step runs, or later."""
        self.mail.hold_back = hold_back
        self.loop.turn(max_wait_s=0.0)

    def check(self) -> None:
        """Everything that must hold between any two events."""
        self.engine.scheduler.check_integrity()
        claims = self.loop.claims()
        for ledger in self.engine.ledgers:
            counts = ledger.counts()
            assert counts.free + counts.cached + counts.request + counts.pushing + counts.reserved == counts.total
        holds = {(h.kind, subject_of(h).transfer) for ledger in self.engine.ledgers for h in ledger.holders()}
        claimed = {claim.transfer for claim in claims}
        assert {t for kind, t in holds if kind is not HoldKind.REQUEST} <= claimed, "blocks are held for nobody"
        for (side, transfer), told in self.outcomes.items():
            assert len(told) == 1, f"transfer {transfer} ended {told} at the {side}"
        opened = {t.transfer for t in self.sender.transfers()} | {t.transfer for t in self.receiver.transfers()}
        for transfer in [t for t in self.states if t not in opened]:
            assert self.states.pop(transfer).is_terminal, "a transfer was forgotten before its end"

    def check_baseline(self) -> None:
        """Nothing is held and nothing is open: every block is free or cached."""
        self.check()
        for ledger in self.engine.ledgers:
            assert ledger.holders() == {}, ledger.holders()
        assert self.receiver.transfers() == [], "the receiver waits for a transfer"
        assert self.sender.transfers() == [], "the sender has a transfer open"
        assert self.loop.claims() == []

    def has_verified(self, transfer: TransferId) -> bool:
        """True if this is a hand-over that the peer has verified: it then has nothing left there, only its own link."""
        role = self.role
        handover = role._by_transfer.get(transfer) if isinstance(role, PrefillRole) else None
        return handover is not None and handover.is_verified

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()
        self.pulse.close()

    def note_states(self) -> None:
        """Keep the states of open transfers at hand, to see that each ends where the diagram ends."""
        for transfer, incoming in self.receiver._intake._transfers.items():
            self.states.setdefault(transfer, incoming.state)
        for transfer, opened in self.sender._transfers.items():
            self.states.setdefault(transfer, opened.outgoing._state)

    def _ledger(self, group: int) -> Callable[[], BlockLedger]:
        return lambda: self.engine.ledgers[group]

    def _receiver_event(self, event: Verified | Failed) -> None:
        self.outcomes.setdefault(("receiver", event.transfer), []).append(type(event).__name__)
        self.mail.events.append(event)

    def _sender_event(self, event: object) -> None:
        transfer: TransferId = event.transfer  # type: ignore[attr-defined]
        self.outcomes.setdefault(("sender", transfer), []).append(type(event).__name__)
        self.mail.events.append(event)


def _create_role(name: RoleName, context: RoleContext) -> Role:
    return PrefillRole(context) if name is RoleName.PREFILL else DecodeRole(context)
