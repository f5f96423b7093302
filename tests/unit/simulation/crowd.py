"""One decode worker and a crowd of prefill workers that only send messages and pushes: order and time of tickets.

Promises: a ticket only for an announced and requested transfer; in the order of requests, save for peers that have
their share while others wait; no more than can run at once; taken back only if nothing came for it for a while; and in
the end all are served.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from tandem.core.clock import ManualClock
from tandem.core.ids import BlockId, GroupId, Incarnation, Rank, WorkerId
from tandem.core.state_enums import RoleName
from tandem.decode_worker.ticket_grants import UNUSED_S
from tandem.kvtransfer.frame import FrameKind, decode
from tandem.kvtransfer.jobs import Control, FrameWriter, Push
from tandem.kvtransfer.kv_pool_access import HostPool, TokenRun
from tandem.kvtransfer.outgoing_transfer import Outgoing
from tandem.kvtransfer.ticket import Ticket
from tandem.kvtransfer.transports.base import Peer
from tandem.kvtransfer.wire import profile_to_wire
from tandem.rpc.v1 import engine_pb2 as e
from tandem.rpc.v1 import generation_pb2 as g
from tandem.rpc.v1 import worker_pb2 as w
from tandem.workercore.proto_convert import ticket_from_wire
from tests.unit.engine.simulation import layout, prompt_of
from tests.unit.simulation.frames import Capture
from tests.unit.simulation.memory import Network, Packet
from tests.unit.simulation.rank import Worker

PEERS = ("p0", "p1", "p2")
SHARE = 4
MAX_SEQUENCES = 8
TURN_S = 0.25
MAX_TURNS = 600


@dataclass
class Wish:
    """One request: the messages of its router and its prefill worker, and its results."""

    id: str
    peer: str
    tokens: int
    is_announced: bool = False
    asked: int = 0
    """Its place in the order of asking; 0 = it has not asked, or has its answer."""
    ticket: Ticket | None = None
    granted_s: float = 0.0
    frames: Iterator[Packet] | None = None
    is_touched: bool = False
    is_completed: bool = False
    is_over: bool = False
    tickets: list[int] = field(default_factory=list)

    @property
    def is_waiting(self) -> bool:
        return self.is_announced and self.asked > 0 and not self.is_over


class Crowd:
    """`check` and every method raise AssertionError at a broken promise."""

    def __init__(self, blocks: int, max_tokens: int = 2) -> None:
        self.clock, self._network = ManualClock(50.0), Network()
        self.shape = layout()
        self.worker = Worker(
            "d0", RoleName.DECODE, Incarnation(9), shape=self.shape, blocks=blocks, network=self._network,
            clock=self.clock, max_sequences=MAX_SEQUENCES,
        )  # fmt: skip
        self._blocks, self._max_tokens = blocks, max_tokens
        self._intake = self.worker.receiver._intake
        self._links = {
            name: self._intake.connect(Peer(worker=WorkerId(name), incarnation=Incarnation(1), rank=Rank(0), host="h"))
            for name in PEERS
        }
        self.wishes: dict[str, Wish] = {}
        self._asked = 0
        self.revoked = 0

    # ---- what can happen -------------------------------------------------------------------------------------------

    def wish(self, peer: str, tokens: int, *, is_announced: bool = True, is_asked: bool = True) -> Wish:
        """A request begins, with either half of its ticket, or both."""
        new = Wish(f"r{len(self.wishes)}", peer, tokens)
        self.wishes[new.id] = new
        if is_announced:
            self.announce(new)
        if is_asked:
            self.ask(new)
        return new

    def announce(self, wish: Wish) -> None:
        if wish.is_announced or wish.is_over:
            return
        wish.is_announced = True
        number = int(wish.id[1:])
        submit = w.Submit(
            request=wish.id, attempt=1, leg=w.LEG_DECODE, prompt=prompt_of(wish.tokens, seed=number), timeout_s=1000.0,
            sampling=g.SamplingParams(
                max_tokens=self._max_tokens, n=1, top_p=1.0, repetition_penalty=1.0, ignore_eos=True
            ),
        )  # fmt: skip
        self._router(w.RouterMessage(submit=submit))

    def ask(self, wish: Wish) -> None:
        if wish.asked or wish.ticket is not None or wish.is_over:
            return
        self._asked += 1
        wish.asked = self._asked
        asked = w.TicketRequest(
            request=wish.id, attempt=1, sender_incarnation=1, receiver_incarnation=9,
            profile=profile_to_wire(self.worker.context.profile),
        )  # fmt: skip
        self._say(wish, w.PeerMessage(ticket_request=asked))

    def push(self, wish: Wish, frames: int) -> None:
        """Deliver so many frames of the prompt, or as many as are left."""
        if wish.frames is None or wish.is_over:
            return
        for _ in range(frames):
            packet = next(wish.frames, None)
            if packet is None:
                return
            frame, _ = decode(memoryview(packet[0]))
            self._network.landing = frame
            try:
                self._intake.accept(frame, memoryview(bytearray(packet[1])), self._links[wish.peer])
            finally:
                self._network.landing = None
            wish.is_touched = wish.is_touched or frame.kind is FrameKind.DATA

    def complete(self, wish: Wish) -> None:
        """The first token was sampled and all was pushed."""
        if wish.ticket is None or wish.is_over or wish.is_completed:
            return
        wish.is_completed = True
        complete = w.Complete(
            request=wish.id, attempt=1, transfer=wish.ticket.transfer, sender_incarnation=1, host="h",
            choices=[g.ChoiceState(choice=0, tokens=[5])],
        )  # fmt: skip
        self._say(wish, w.PeerMessage(complete=complete))

    def cancel(self, wish: Wish) -> None:
        """The router does not want it any more."""
        if not wish.is_over:
            wish.is_over = True
            self._router(w.RouterMessage(cancel=w.Cancel(request=wish.id, attempt=1, reason="a test")))

    def give_up(self, wish: Wish) -> None:
        """The prefill worker does not want it any more."""
        if not wish.is_over:
            wish.is_over = True
            transfer = wish.ticket.transfer if wish.ticket is not None else 0
            failed = w.TransferFailed(request=wish.id, attempt=1, transfer=transfer, code="cancelled")
            self._say(wish, w.PeerMessage(failed=failed))

    def turn(self, seconds: float = 0.0) -> None:
        """Run one turn of the worker; its answers are read and judged at once."""
        self.clock.advance(seconds)
        self._name_all()
        self._turn()

    def _turn(self) -> None:
        before = {wish.id: wish.asked for wish in self.wishes.values() if wish.is_waiting}
        self.worker.turn()
        granted, revoked = [], self.revoked
        while self.worker.said:
            message = self.worker.said.popleft()
            if message.HasField("peer"):
                granted += self._heard(message.peer.message)
            elif message.HasField("router"):
                self._told(message.router.message)
        self._judge(before, granted, has_revoked=self.revoked > revoked)
        running = self.worker.engine.growth_blocks  # a block for each choice
        assert running <= MAX_SEQUENCES, f"{running} choices run, and some of them get no token"
        self.worker.note_states()
        self.worker.check()

    def settle(self) -> None:
        """All act as they should, and all are served, in a bounded number of turns."""
        for _ in range(MAX_TURNS):
            for wish in self.wishes.values():
                self.announce(wish)
                self.ask(wish)
                self.push(wish, 1000)
                self.complete(wish)
            self.turn(TURN_S)
            if all(wish.is_over for wish in self.wishes.values()) and self.worker.is_at_rest:
                break
        else:
            left = [wish for wish in self.wishes.values() if not wish.is_over]
            raise AssertionError(f"not all were served: {left}, {self.worker.loop.claims()}")
        self.worker.check_baseline()

    def close(self) -> None:
        self.worker.close()

    # ---- below -----------------------------------------------------------------------------------------------------

    def _heard(self, message: w.PeerMessage) -> list[Wish]:
        kind = message.WhichOneof("kind")
        if kind == "ticket":
            wish = self.wishes[message.ticket.request]
            if wish.is_over:
                return []
            assert wish.is_waiting, "a ticket that nobody asked for or announced"
            assert wish.ticket is None, "a second ticket for one attempt"
            wish.asked, wish.granted_s, wish.is_touched = 0, self.clock.now_s(), False
            wish.ticket = ticket_from_wire(message.ticket, WorkerId(wish.peer), WorkerId("d0"))
            wish.tickets.append(wish.ticket.transfer)
            wish.frames = self._frames(wish.ticket)
            return [wish]
        if kind == "revoked":
            wish = self.wishes[message.revoked.request]
            if wish.is_over:
                return []
            assert wish.ticket is not None
            assert wish.ticket.transfer == message.revoked.transfer
            assert not wish.is_touched, "a ticket was taken back though bytes had come for it"
            assert self.clock.now_s() - wish.granted_s >= UNUSED_S - 1e-6, "a ticket was taken back too soon"
            wish.ticket, wish.frames, wish.is_completed = None, None, False
            self.revoked += 1
        elif kind in ("ticket_refused", "failed"):
            name = message.ticket_refused.request or message.failed.request
            wish = self.wishes[name]
            assert wish.is_over or not wish.is_announced, f"{message} ends a request that is wanted"
            wish.is_over = True
        return []

    def _told(self, message: w.WorkerMessage) -> None:
        for chunk in message.tokens.chunks:
            if chunk.finish:
                self.wishes[chunk.request].is_over = True
        if message.HasField("failed"):
            wish = self.wishes[message.failed.request]
            assert wish.is_over, message.failed

    def _judge(self, before: dict[str, int], granted: list[Wish], *, has_revoked: bool) -> None:
        """Check that the tickets of one turn went to those next in order; `before`: the waiting ones, and since when.

        A turn that took tickets back shows too little of the state when a request was passed over.
        """
        passed = [self.wishes[name] for name in before if self.wishes[name].is_waiting]
        for wish in {wish.peer: wish for wish in granted}.values():
            if any(other.peer != wish.peer for other in passed):
                most = max(self._blocks // SHARE, self._needs(wish))
                assert self._held(wish.peer) <= most, f"{wish.peer} got more than its share"
        for wish in granted:
            for older in passed:
                if before[older.id] < before[wish.id] and not has_revoked:
                    would_hold = self._held(older.peer) + self._needs(older)
                    assert would_hold > self._blocks // SHARE, f"{wish.id} overtook {older.id}"

    def _held(self, peer: str) -> int:
        """Blocks of a peer's tickets that are not admitted; all were counted when they were granted."""
        mine = [x for x in self.wishes.values() if x.peer == peer and x.ticket is not None and not x.is_over]
        claimed = {claim.transfer for claim in self.worker.loop.claims()}
        return sum(self._needs(x) for x in mine if x.ticket is not None and x.ticket.transfer in claimed)

    def _needs(self, wish: Wish) -> int:
        return self.shape.groups[0].blocks_for(wish.tokens)

    def _frames(self, ticket: Ticket) -> Iterator[Packet]:
        """OPEN, every block and FINISH; of what content does not matter here."""
        blocks, flying = ticket.groups[0].blocks, list[Packet]()
        spec = self.shape.groups[0]
        pool = HostPool(spec, 1, memoryview(bytearray(max(1, len(blocks)) * spec.block_bytes())))
        outgoing = Outgoing(ticket, {GroupId(0): pool}, Rank(0), self.clock)
        writer = FrameWriter(Rank(0), on_broken=_broken, clock=self.clock)
        source = TokenRun(tuple(map(BlockId, range(len(blocks)))), spec.block_tokens)
        push = Push(outgoing, GroupId(0), pool, outgoing.routes[GroupId(0)][0], source, blocks, range(2))
        link = Capture(flying, max_payload_bytes=spec.block_bytes())
        for job in (Control(outgoing, FrameKind.OPEN), push, Control(outgoing, FrameKind.FINISH)):
            for _ in writer.write(link, job):
                yield flying.pop()

    def _name_all(self) -> None:
        """Send every peer's message of each second: the tickets that it works on."""
        for peer in PEERS:
            transfers = [
                x.ticket.transfer for x in self.wishes.values() if x.peer == peer and x.ticket and not x.is_over
            ]
            if transfers:
                holding = w.Holding(incarnation=1, peer_incarnation=9, transfers=transfers)
                self._from_peer(peer, w.PeerMessage(holding=holding))

    def _say(self, wish: Wish, message: w.PeerMessage) -> None:
        self._from_peer(wish.peer, message)

    def _from_peer(self, peer: str, message: w.PeerMessage) -> None:
        stamped = e.FromPeer(worker=peer, incarnation=1, message=message, received_s=self.clock.now_s())
        self.worker.mail.messages.append(e.HostToRank(peer=stamped))
        self._turn()

    def _router(self, message: w.RouterMessage) -> None:
        self.worker.mail.messages.append(e.HostToRank(router=e.FromRouter(router="router", message=message)))
        self._turn()


def _broken(outgoing: Outgoing, reason: str) -> None:
    raise AssertionError(reason)
