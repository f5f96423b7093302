"""The `Role` interface of a worker, and the context passed to it. Everything here runs on the step-loop thread."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from tandem.core import metric_names as names
from tandem.core.block_hash import BlockHash, HashRoot
from tandem.core.clock import Clock
from tandem.core.errors import TandemError
from tandem.core.handoff import HandoffTiming
from tandem.core.ids import Incarnation, TransferId, WorkerId
from tandem.core.kv_compatibility import KVProfile, offers_for
from tandem.core.label_limiter import BoundedLabel
from tandem.core.state_enums import RoleName
from tandem.engine.engine import Engine
from tandem.engine.model_work import ModelWork
from tandem.engine.request import LayerHook, StepResult, TokenOutput
from tandem.kvtransfer.leases import TransferLeases
from tandem.kvtransfer.link_speeds import LinkSpeeds
from tandem.rpc.v1 import worker_pb2 as w
from tandem.workercore.outbox import Outbox
from tandem.workercore.requests import RequestTable, Tracked
from tandem.workercore.transfer_interfaces import ReceivingEnd, SendingEnd


@dataclass(frozen=True, slots=True)
class Claim:
    """Claim of a transfer that this worker works on, for audits. "reservation": granted, not admitted; or requested
    from another worker that holds the blocks. "handover": being pushed, or kept for that, not ended. "quiescing": given
    up, and its source may still be read (then the peer is not known any more: "" and 0)."""

    kind: Literal["reservation", "handover", "quiescing"]
    key: str
    transfer: TransferId
    peer: WorkerId
    peer_incarnation: Incarnation


@dataclass(slots=True, kw_only=True)
class RoleContext:
    """The context that rank 0 of a worker passes to its role. `counters` are cumulative in this incarnation.

    `speeds`: known speeds of links from this host; None = none are measured. `work`: the cost of computing its model;
    None = none is computed. `peaks`: gauges of its accelerators' nominal peaks, all ranks together, as far as
    configured.
    """

    worker: WorkerId
    incarnation: Incarnation
    profile: KVProfile
    host: str
    engine: Engine
    receiver: ReceivingEnd
    sender: SendingEnd
    requests: RequestTable
    outbox: Outbox
    clock: Clock
    leases: TransferLeases = field(default_factory=TransferLeases)
    speeds: LinkSpeeds | None = None
    work: ModelWork | None = None
    peaks: Mapping[str, float] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=dict)
    peers: BoundedLabel = field(default_factory=BoundedLabel)
    """Workers that it sends KV to, as counters name them."""
    last_step: tuple[float, float] = (0.0, 0.0)

    @property
    def fingerprint(self) -> str:
        return self.profile.fingerprint

    def link_speed(self, worker: WorkerId) -> float | None:
        """Measured bytes a second to another worker; None = the link to it was not measured.

        Of rank 0's slowest link in use there; before there is one, of the fastest transport between the two hosts.
        """
        if self.speeds is None:
            return None
        links = [link for link in self.sender.links() if link.peer == worker and link.rank == 0]
        used = [link.bytes_per_s for link in links if link.bytes_per_s > 0]
        return min(used) if used else self.speeds.fastest_to(worker, self.host)

    def offers_to(self, worker: WorkerId) -> tuple[str, ...]:
        """The codecs that this worker offers on its link to that one, best first."""
        return offers_for(self.profile, self.link_speed(worker)) if self.profile.offers else ()

    def hash_root(self, salt: bytes, *, lossy: str = "") -> BlockHash:
        """Root of the block hashes of a tenant's requests here; `lossy` as in kv_compatibility.WireForm."""
        block_tokens = self.profile.layout.groups[0].block_tokens
        return HashRoot(fingerprint=self.fingerprint, block_tokens=block_tokens, salt=salt, lossy=lossy).digest()

    def rest_of_step_s(self, ready_s: float) -> float:
        """Wait, for the step then in progress (the last one), of something that was ready at `ready_s`."""
        started_s, ended_s = self.last_step
        return max(0.0, ended_s - ready_s) if started_s <= ready_s else 0.0

    def count(self, name: str, amount: float = 1.0) -> None:
        self.counters[name] = self.counters.get(name, 0.0) + amount

    def count_sent(self, peer: WorkerId, size_bytes: int, took_s: float) -> None:
        """A transfer to `peer` was verified there, `took_s` after its ticket was here."""
        self.count("kv_sent_bytes", size_bytes)
        self._count_link(peer, "verified")
        to = self.peers.of(peer)
        self.count(names.counter_key(names.KV_LINK_BYTES, peer=to), size_bytes)
        self.count(names.counter_key(names.KV_LINK_SECONDS, peer=to), took_s)

    def count_unsent(self, peer: WorkerId) -> None:
        """A transfer to `peer` with a ticket here failed."""
        self._count_link(peer, "failed")

    def _count_link(self, peer: WorkerId, outcome: str) -> None:
        self.count(names.counter_key(names.KV_LINK_TRANSFERS, peer=self.peers.of(peer), outcome=outcome))

    def report_token(self, tracked: Tracked, output: TokenOutput, handoff: HandoffTiming | None = None) -> None:
        """Report a token to its router, the first one with the number of its prompt's cached tokens."""
        cached = None if tracked.has_reported_cached else self.engine.cached_tokens(output.key)
        tracked.has_reported_cached = True
        self.outbox.token(tracked, output, cached_tokens=cached, handoff=handoff)

    def end(self, tracked: Tracked) -> bool:
        """Forget a request; later messages about it are recognised as late. False if it is not here."""
        self.requests.add_tombstone(tracked.request, tracked.attempt, self.clock.now_s())
        return self.requests.remove(tracked.key) is not None

    def fail(self, tracked: Tracked, error: TandemError) -> None:
        """End a request with an error: report it to its router, forget it here, return its engine blocks."""
        self.engine.cancel(tracked.key)
        if self.end(tracked):
            self.outbox.failed(tracked, error)
            self.count("requests_failed")


class Role(Protocol):
    """One way of serving requests. The step loop calls in; the role answers through the context's outbox."""

    name: RoleName

    def submit(self, tracked: Tracked, message: w.Submit) -> None:
        """A router sent a request or announced one; raises TandemError to refuse it."""

    def cancel(self, tracked: Tracked, reason: str) -> None:
        """The answer is no longer wanted, in any phase; all blocks go back as soon as nothing can write."""

    def end_choices(self, tracked: Tracked, choices: Collection[int]) -> None:
        """These choices, which `tracked.ended_choices` names from now on, are no longer wanted; the others go on."""

    def peer_message(self, peer: WorkerId, message: w.PeerMessage, received_s: float) -> None:
        """The worker at the other end of a transfer sent a message."""

    def peer_gone(self, peer: WorkerId, incarnation: Incarnation, reason: str) -> None:
        """That worker's control channel is broken: every transfer with this incarnation of it (0 = any) is over."""

    def transfer_event(self, event: object) -> None:
        """A transport thread reported something (ReceiverEvent or SenderEvent)."""

    @property
    def layer_hook(self) -> LayerHook | None:
        """Called inside a step as layer groups finish."""

    def before_step(self) -> None:
        """About to run a step, or idle: grant waiting requests."""

    def after_step(self, result: StepResult) -> None:
        """A step ended."""

    def tick(self, now_s: float) -> None:
        """Called a few times a second, for deadlines."""

    def claims(self) -> list[Claim]:
        """Every transfer that it works on, for audits."""

    def is_idle(self) -> bool:
        """True if no request, ticket, transfer or fence is pending here."""
