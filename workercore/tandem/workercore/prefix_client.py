"""The requester of a fetch: a request waits here while blocks of its prefix come from a worker that holds them.

    begin ──▶ asked ──offer──▶ receiving ──verified──▶ cached ──▶ the request runs
                └──────────────────┴── refused, lost, failed ──▶ the next source, or the request computes
                                       late, no room ──────────▶ the request computes

A fetch decides nothing about its request: the request runs after any outcome, unless it is cancelled.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from tandem.core import kv_compatibility
from tandem.core import metric_names as names
from tandem.core.block_hash import BlockHash, chain
from tandem.core.errors import TransferError
from tandem.core.ids import Incarnation, RequestId, TransferId, WorkerId, new_transfer_id
from tandem.core.ledger import Holder, HoldKind
from tandem.core.logs import event
from tandem.core.proto_mapping import to_proto
from tandem.kvtransfer.events import Failed, Verified
from tandem.kvtransfer.ticket import Ticket
from tandem.kvtransfer.wire import profile_from_wire, profile_to_wire
from tandem.rpc.v1 import worker_pb2 as w
from tandem.workercore.block_reservation import BlockReservation, publish_prefix, reserve_prefix, unneeded_blocks
from tandem.workercore.outbox import transfer_failed
from tandem.workercore.requests import Tracked, fetch_holder, fetch_name, request_key
from tandem.workercore.role_interface import Claim, RoleContext

_log = logging.getLogger(__name__)
ASSUMED_BYTES_PER_S = 100e6
"""Of an unmeasured link: a gigabit."""
PATIENCE = 4.0
"""Multiple of the expected wire time that a fetch may take, beyond the floor."""
FLOOR_S, CEILING_S = 2.0, 15.0
"""The floor covers a dial and the steps in progress at both ends."""
MAX_TOKENS = 500_000
"""Longer prefixes may not fit one message."""
_UNKNOWN = RequestId("")


@dataclass(slots=True, kw_only=True)
class Fetch:
    """One request that waits. `transfer` and `source` are those of the current try; `room` is there from the offer
    on."""

    tracked: Tracked
    message: w.Submit
    tokens: tuple[int, ...]
    limit_blocks: int
    """Leading blocks that the request can use: its last token is always computed."""
    sources: deque[w.PrefixSource]
    began_s: float
    deadline_s: float
    source: w.PrefixSource = field(default_factory=w.PrefixSource)
    transfer: TransferId = field(default_factory=new_transfer_id)
    room: BlockReservation | None = None
    root: BlockHash | None = None
    """Root under which the request finds the blocks, if it is not the exact one."""

    @property
    def peer(self) -> WorkerId:
        return WorkerId(self.source.worker.worker)

    @property
    def peer_incarnation(self) -> Incarnation:
        return Incarnation(self.source.worker.incarnation)

    @property
    def name(self) -> RequestId:
        return fetch_name(self.tracked.request)

    @property
    def holder(self) -> Holder:
        return fetch_holder(HoldKind.RESERVED, self.name, self.tracked.attempt, self.transfer)


class PrefixClient:
    """All fetches of this worker. Belongs to the step loop's thread; `run` gets every request that waited, once."""

    def __init__(self, context: RoleContext, run: Callable[[Tracked, w.Submit], None]) -> None:
        self._context, self._run = context, run
        self._profile = profile_to_wire(context.profile)
        self._block_tokens = context.engine.layout.groups[0].block_tokens
        self._fetches: dict[TransferId, Fetch] = {}

    def begin(self, tracked: Tracked, message: w.Submit) -> bool:
        """Ask for what others hold of the request's prefix; False if no named worker holds more than this one.

        Raises what the engine refuses the request with: for one that can never run nothing is fetched.
        """
        if not message.sources or message.leg not in (w.LEG_FULL, w.LEG_PREFILL):
            return False
        if tracked.engine_request.sampling.prompt_logprobs is not None:  # all of the prompt is computed
            return False
        self._context.engine.check(tracked.engine_request)
        size, tokens = self._block_tokens, _known_tokens(tracked)
        limit = (len(tokens) - 1) // size
        if not 0 < limit * size <= MAX_TOKENS:
            return False
        request = tracked.engine_request
        hashes = chain(request.hash_root, tokens, size, request.hashes)[:limit]
        own = self._context.engine.hit_blocks(hashes, is_whole=_is_whole(message))
        sources = deque(
            source
            for source in message.sources
            if min(source.tokens // size, limit) > own and self._is_usable(source, message.leg)
        )
        if not sources:
            return False
        now_s = self._context.clock.now_s()
        fetch = Fetch(
            tracked=tracked, message=message, tokens=tokens, limit_blocks=limit, sources=sources, began_s=now_s,
            deadline_s=now_s + self._bound_s(sources[0], limit - own, tracked.deadline_s - now_s),
        )  # fmt: skip
        self._ask(fetch, own)
        return True

    def cancel(self, tracked: Tracked) -> None:
        """The answer is no longer wanted: the request is not run, its fetch ends at both ends."""
        for fetch in self._of(lambda fetch: fetch.tracked is tracked):
            self._stop(fetch, "cancelled", "the request was cancelled")

    # ---- messages and events ---------------------------------------------------------------------------------------

    def offered(self, peer: WorkerId, offer: w.FetchOffer) -> None:
        """Take in the holder's offer; anything but the answer to the try under way is late, repeated or foreign."""
        fetch = self._fetches.get(TransferId(offer.fetch))
        is_known = fetch is not None and fetch.peer == peer and fetch.peer_incarnation == offer.holder_incarnation
        if fetch is None or not is_known or fetch.room is not None:
            self._context.count("fetch_offers_dropped")
            if offer.tokens and not is_known:
                failed = transfer_failed(fetch_name(_UNKNOWN), 0, offer.fetch, "cancelled")
                self._context.outbox.to_peer(peer, Incarnation(offer.holder_incarnation), failed)
            return
        blocks = min(offer.tokens // self._block_tokens, fetch.limit_blocks)
        if not blocks:
            self._failed(fetch, "refused", offer.message or "it holds none of it", is_peer_told=not offer.tokens)
            return
        try:
            self._receive(fetch, offer, blocks)
        except (TransferError, ValueError) as error:
            self._failed(fetch, "refused", str(error))

    def failed(self, peer: WorkerId, message: w.TransferFailed) -> None:
        """End the try: the holder gave up."""
        fetch = self._fetches.get(TransferId(message.transfer))
        if fetch is not None and fetch.peer == peer:
            self._failed(fetch, "holder", message.message, is_peer_told=True)

    def peer_gone(self, peer: WorkerId, incarnation: Incarnation, reason: str) -> None:
        for fetch in self._of(lambda fetch: fetch.peer == peer and incarnation in (0, fetch.peer_incarnation)):
            self._failed(fetch, "peer_gone", reason, is_peer_told=True)

    def transfer_event(self, outcome: object) -> bool:
        """True if this was the event of a fetch."""
        if not isinstance(outcome, Verified | Failed):
            return False
        fetch = self._fetches.get(outcome.transfer)
        if fetch is None:
            return False
        if isinstance(outcome, Verified):
            self._verified(fetch, outcome)
        else:
            self._failed(fetch, "transfer", outcome.reason)
        return True

    def tick(self, now_s: float) -> None:
        for transfer in self._context.leases.overdue():
            fetch = self._fetches.get(transfer)
            if fetch is not None:
                self._failed(fetch, "forgotten", "the holder no longer names it")
        for fetch in self._of(lambda fetch: now_s >= fetch.deadline_s):
            fetch.sources.clear()
            self._failed(fetch, "late", "it took too long")

    def claims(self) -> list[Claim]:
        return [
            Claim("reservation", _key(fetch), transfer, fetch.peer, fetch.peer_incarnation)
            for transfer, fetch in self._fetches.items()
        ]

    def is_idle(self) -> bool:
        return not self._fetches

    # ---- one try ---------------------------------------------------------------------------------------------------

    def _ask(self, fetch: Fetch, own_blocks: int) -> None:
        fetch.source, fetch.transfer, fetch.room, fetch.root = fetch.sources.popleft(), new_transfer_id(), None, None
        goal = min(fetch.source.tokens // self._block_tokens, fetch.limit_blocks)
        needless = min(unneeded_blocks(self._context.engine, goal, is_whole=_is_whole(fetch.message)))
        request = w.FetchRequest(
            fetch=fetch.transfer,
            request=fetch.tracked.request,
            attempt=fetch.tracked.attempt,
            requester_incarnation=self._context.incarnation,
            holder_incarnation=fetch.peer_incarnation,
            tokens=fetch.tokens[: fetch.source.tokens],  # the holder's blocks may have another size
            have_tokens=max(own_blocks, needless) * self._block_tokens,
            salt=fetch.tracked.salt,
            lossy=fetch.source.lossy,
            profile=self._profile,
            # A prefill worker's hand-over must be exact, so its input must be.
            codecs=self._context.profile.codecs if fetch.message.leg == w.LEG_FULL else (),
        )
        self._fetches[fetch.transfer] = fetch
        self._context.leases.open(fetch.transfer, fetch.peer, fetch.peer_incarnation)
        self._tell(fetch, w.PeerMessage(fetch_request=request))

    def _receive(self, fetch: Fetch, offer: w.FetchOffer, blocks: int) -> None:
        """Reserve room for the offered blocks and send the ticket. Raises TransferError or ValueError for an unusable
        offer."""
        engine, profile = self._context.engine, self._context.profile
        form = kv_compatibility.agree(profile_from_wire(offer.profile), profile, offered=tuple(offer.codecs))
        lossy = "+".join(name for name in (fetch.source.lossy, form.lossy) if name)
        if lossy and fetch.message.leg != w.LEG_FULL:
            raise TransferError("its blocks would not be exact", why=lossy)
        root = self._context.hash_root(fetch.tracked.salt, lossy=lossy)
        hashes = chain(root, fetch.tokens[: blocks * self._block_tokens], self._block_tokens)
        is_whole = _is_whole(fetch.message)
        if engine.hit_blocks(hashes, is_whole=is_whole) == len(hashes):
            self._done(fetch, root)  # computed here meanwhile
            return
        others = [other.room for other in self._fetches.values() if other.room is not None]
        fetch.room = reserve_prefix(engine, fetch.holder, hashes, others, is_whole=is_whole)
        if fetch.room is None:
            fetch.sources.clear()
            self._failed(fetch, "no_room", "blocks are short")
            return
        fetch.root = root
        ticket = Ticket(
            transfer=fetch.transfer,
            request=fetch.name,
            attempt=fetch.tracked.attempt,
            sender=fetch.peer,
            sender_incarnation=fetch.peer_incarnation,
            receiver=self._context.worker,
            receiver_incarnation=self._context.incarnation,
            groups=fetch.room.groups,
            endpoints=self._context.receiver.endpoints(),
            layout=profile.layout,
            codec=form.codec,
        )
        self._context.receiver.expect(ticket)
        self._tell(fetch, w.PeerMessage(ticket=to_proto(w.Ticket, ticket, profile=self._profile)))

    def _verified(self, fetch: Fetch, outcome: Verified) -> None:
        room, root = fetch.room, fetch.root
        try:
            if room is None or root is None:
                raise TransferError("it was verified before it was offered")
            self._context.receiver.admit(fetch.transfer)
        except TransferError as error:
            self._failed(fetch, "transfer", error.message)
            return
        publish_prefix(self._context.engine, room)
        del self._fetches[fetch.transfer]
        self._context.leases.close(fetch.transfer)
        self._context.count(names.FETCHES)
        self._context.count(names.FETCHED_TOKENS, room.gained_blocks * self._block_tokens)
        self._context.count(names.FETCHED_BYTES, outcome.bytes)
        self._context.count("kv_received_bytes", outcome.bytes)
        self._context.count("kv_received_blocks", room.new_blocks)
        took_s = self._context.clock.now_s() - fetch.began_s
        event(_log, "prefix fetched", **fetch.tracked.names, peer=fetch.peer, blocks=room.new_blocks, took_s=took_s)
        self._go(fetch, root)

    # ---- ends ------------------------------------------------------------------------------------------------------

    def _done(self, fetch: Fetch, root: BlockHash) -> None:
        self._stop(fetch, "not_needed", "the blocks are already here")
        self._go(fetch, root)

    def _go(self, fetch: Fetch, root: BlockHash | None = None) -> None:
        """Run the request, which finds and leaves blocks under `root`: KV changed on its way, and KV computed from it,
        never counts as exact."""
        tracked = fetch.tracked
        if root is not None:
            tracked.engine_request = tracked.engine_request.under(root)
        self._run(tracked, fetch.message)

    def _failed(self, fetch: Fetch, reason: str, why: str, *, is_peer_told: bool = False) -> None:
        """End this try: the next source is asked, or the request computes."""
        event(_log, "fetch failed", logging.WARNING, **fetch.tracked.names, peer=fetch.peer, reason=reason, why=why)
        self._context.count(names.counter_key(names.FETCHES_FAILED, reason=reason))
        self._stop(fetch, reason, why, is_peer_told=is_peer_told)
        if not fetch.sources:
            self._go(fetch)
            return
        request = fetch.tracked.engine_request
        hashes = chain(request.hash_root, fetch.tokens, self._block_tokens, request.hashes)[: fetch.limit_blocks]
        self._ask(fetch, self._context.engine.hit_blocks(hashes, is_whole=_is_whole(fetch.message)))

    def _stop(self, fetch: Fetch, code: str, why: str, *, is_peer_told: bool = False) -> None:
        """Forget a try: fence it first, then its blocks go back."""
        del self._fetches[fetch.transfer]
        self._context.leases.close(fetch.transfer)
        if fetch.room is not None:
            self._context.receiver.cancel(fetch.transfer)
            self._context.engine.blocks.release_holder(fetch.holder)
        if not is_peer_told:
            self._tell(fetch, transfer_failed(fetch.name, fetch.tracked.attempt, fetch.transfer, code, why))

    def _tell(self, fetch: Fetch, message: w.PeerMessage) -> None:
        """Always over the channel that this worker dials: its messages about a fetch arrive in order."""
        address = fetch.source.worker.address
        self._context.outbox.to_peer(fetch.peer, fetch.peer_incarnation, message, address=address)

    # ---- small questions -------------------------------------------------------------------------------------------

    def _of(self, is_meant: Callable[[Fetch], bool]) -> list[Fetch]:
        return [fetch for fetch in self._fetches.values() if is_meant(fetch)]

    def _is_usable(self, source: w.PrefixSource, leg: int) -> bool:
        is_other = source.worker.worker not in ("", self._context.worker)
        return is_other and (leg == w.LEG_FULL or not source.lossy)

    def _bound_s(self, source: w.PrefixSource, blocks: int, left_s: float) -> float:
        """Bound on the request's wait for `blocks`: the time of their bytes, with patience, and never past half of its
        own time."""
        wire_bytes = blocks * sum(spec.block_bytes() for spec in self._context.engine.layout.groups)
        speed = self._context.link_speed(WorkerId(source.worker.worker)) or ASSUMED_BYTES_PER_S
        return min(CEILING_S, FLOOR_S + PATIENCE * wire_bytes / speed, left_s / 2)


def _known_tokens(tracked: Tracked) -> tuple[int, ...]:
    """Tokens with KV that the request needs: its prompt and, where there is one choice, the output that is fixed."""
    request = tracked.engine_request
    if request.sampling.n != 1 or not request.forced:
        return request.prompt
    return (*request.prompt, *request.forced[0].tokens)


def _is_whole(message: w.Submit) -> bool:
    """True for a prefill worker: it hands over what it computes, so it needs also what lies behind a window."""
    return message.leg != w.LEG_FULL


def _key(fetch: Fetch) -> str:
    return request_key(fetch.name, fetch.tracked.attempt)
