"""The step loop of rank 0: take the input, let the role act, run one engine step, report. One thread does it all."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tandem.core.block_hash import chain
from tandem.core.errors import CancelledError, DeadlineError, InternalError, TandemError
from tandem.core.ids import Attempt, Incarnation, RequestId, RouterId, WorkerId
from tandem.core.logs import event
from tandem.core.state_enums import Phase, RoleName
from tandem.engine.request import EngineRequest, PrefillSlice, RequestKind, StepResult
from tandem.rpc.v1 import engine_pb2 as e
from tandem.rpc.v1 import worker_pb2 as w
from tandem.workercore import audit
from tandem.workercore.heartbeat import Pulse
from tandem.workercore.inbox import Deferred, Mail
from tandem.workercore.load_meter import LoadMeter
from tandem.workercore.prefix_exchange import PrefixExchange
from tandem.workercore.proto_convert import choices_from_wire, prompt_from_wire, sampling_from_wire
from tandem.workercore.requests import Tracked, request_key
from tandem.workercore.role_interface import Claim, Role, RoleContext

_log = logging.getLogger(__name__)
IDLE_WAIT_S = 0.1
BLOCKED_WAIT_S = 0.01
"""Wait when requests need blocks that are held elsewhere; a message that frees some wakes the loop at once."""
CHECK_AFTER_S = 1.0
"""Of a pause; then all blocks are checked, once: 70 ms for 200,000 of them, for which a new request waits."""
REPORT_EVERY_S = 0.1
MAX_REQUEST_S = 3600.0
"""Of a request without a deadline from its router."""
TRACE_CHARS = 32
"""Limit of a trace's id, which logs show."""
MAX_EVENTS = 10_000
"""Block events in one message to the host."""


class StepLoop:
    """Owns the engine, the role and the request table; `run` returns when the host stops it."""

    def __init__(
        self,
        context: RoleContext,
        role: Role,
        inbox: Mail,
        pulse: Pulse,
        create_role: Callable[[RoleName, RoleContext], Role] | None = None,
    ) -> None:
        """`create_role` makes a role that the host assigns later; without it `role` stays the only one."""
        self._context, self._role, self._inbox, self._pulse = context, role, inbox, pulse
        self._create_role = create_role
        self._leaving: list[Role] = []
        """Earlier roles with transfers that are not quiet yet."""
        self._exchange = PrefixExchange(context, self._run)
        self._deferred = Deferred()
        self._is_stopping = self._is_checked = False
        self._wait_s = self._worked_s = 0.0
        self._last_report_s = 0.0
        self._last_report = b""
        self._meter = LoadMeter(context)

    def run(self) -> None:
        """Run until a Stop message. An exception here is a bug and ends the process: the host and the routers
        notice."""
        while not self._is_stopping:
            self.turn()

    def turn(self, max_wait_s: float = IDLE_WAIT_S) -> None:
        """One turn: take what is there (waiting up to `max_wait_s` if there is nothing to do), one step, report.

        Past its lease the rank computes, pushes, publishes and sends nothing. What comes in waits for the lease's
        return, or for the message that makes this another incarnation; the loss of a thread or a rank ends it at once.
        """
        if not self._has_lease():
            self._meter.rest()
            self._wait_for_lease(max_wait_s)
            return
        wait_s = 0.0 if self._deferred else min(self._wait_s, max_wait_s)
        if wait_s:
            self._meter.rest()
        items = [*self._deferred.take(), *self._inbox.take(wait_s)]
        for item in items:
            self._handle(item)
        now_s = self._context.clock.now_s()
        self._expire(now_s)
        self._exchange.tick(now_s)
        for role in self._roles:
            role.tick(now_s)
        self._role.before_step()
        self._wait_s = IDLE_WAIT_S
        if items or self._context.engine.has_work:
            self._worked_s, self._is_checked = now_s, False
        if self._context.engine.has_work:
            self._wait_s = 0.0 if self._step() else BLOCKED_WAIT_S
        elif not self._is_checked and now_s - self._worked_s >= CHECK_AFTER_S and self.is_idle():
            self._context.engine.scheduler.check_integrity()
            self._is_checked = True
        self._fail_unsent()
        self._publish()
        self._report()

    def is_idle(self) -> bool:
        """True if no request, ticket, transfer or fence is pending here."""
        return all(role.is_idle() for role in self._roles) and self._exchange.is_idle()

    def claims(self) -> list[Claim]:
        """Every transfer that is worked on here, for audits."""
        return [*(claim for role in self._roles for claim in role.claims()), *self._exchange.claims()]

    @property
    def _roles(self) -> tuple[Role, ...]:
        return (self._role, *self._leaving)

    def _wait_for_lease(self, max_wait_s: float) -> None:
        for item in self._inbox.take(max_wait_s):
            if isinstance(item, e.HostToRank) and item.HasField("stop"):
                self._is_stopping = True
            else:
                self._deferred.append(item)
        for item in self._deferred:  # also what came in the middle of the last step
            _raise_if_lost(item)
        for item in self._deferred.take_invalidated():
            self._handle(item)
        if self._deferred.is_full:
            self._deferred.void()

    # ---- what came in ----------------------------------------------------------------------------------------------

    def _handle(self, item: object) -> None:
        if isinstance(item, StepResult):
            self._after_step(item)
            return
        _raise_if_lost(item)
        if not isinstance(item, e.HostToRank):
            if not self._exchange.transfer_event(item):
                for role in self._roles:
                    role.transfer_event(item)
            return
        kind = item.WhichOneof("kind")
        if kind == "router":
            self._from_router(RouterId(item.router.router), item.router.message)
        elif kind == "peer":
            peer = WorkerId(item.peer.worker)
            if not self._exchange.peer_message(peer, item.peer.message):
                self._role.peer_message(peer, item.peer.message, item.peer.received_s)
        elif kind == "router_gone":
            for tracked in self._context.requests.of_router(RouterId(item.router_gone.router)):
                self._cancel(tracked, "its router disconnected")
        elif kind == "peer_gone":
            gone = item.peer_gone
            self._exchange.peer_gone(WorkerId(gone.worker), Incarnation(gone.incarnation), gone.reason)
            for role in self._roles:
                role.peer_gone(WorkerId(gone.worker), Incarnation(gone.incarnation), gone.reason)
        elif kind == "incarnation":
            self._new_incarnation(item.incarnation)
        elif kind == "look":
            self._context.outbox.put(e.RankToHost(looked=self._inspect(item.look.id)))
        elif kind == "link_speeds":
            self._meter.links.learn(item.link_speeds)
        elif kind == "stop":
            self._is_stopping = True

    def _from_router(self, router: RouterId, message: w.RouterMessage) -> None:
        kind = message.WhichOneof("kind")
        if kind == "submit":
            self._submit(router, message.submit)
        elif kind == "cancel":
            request, attempt = RequestId(message.cancel.request), Attempt(message.cancel.attempt)
            self._context.requests.add_tombstone(request, attempt, self._context.clock.now_s())
            for tracked in self._context.requests.attempts(request, attempt):
                self._cancel(tracked, message.cancel.reason)
        elif kind == "end_choices":
            self._end_choices(message.end_choices)
        elif kind == "audit":
            report = audit.report(self._context, self._role.name, self.claims(), message.audit.id)
            self._context.outbox.to_router(router, w.WorkerMessage(audit=report))
        elif kind == "repair":
            report = audit.repair(self._context, self._role.name, self.claims(), message.repair)
            self._context.outbox.to_router(router, w.WorkerMessage(audit=report))

    def _submit(self, router: RouterId, message: w.Submit) -> None:
        request, attempt = RequestId(message.request), Attempt(message.attempt)
        is_known = self._context.requests.get(request_key(request, attempt)) is not None
        if is_known or self._context.requests.is_buried(request, attempt):
            self._context.count("submissions_dropped")
            return
        for older in self._context.requests.attempts(request, Attempt(attempt - 1)):
            self._cancel(older, "superseded by a newer attempt")
        try:
            tracked = self._track(router, message)
            self._context.requests.add(tracked)
            if not self._exchange.begin(tracked, message):
                self._role.submit(tracked, message)
            self._context.outbox.phase(tracked, Phase.QUEUED)
            self._context.count("requests_received")
        except TandemError as error:
            self._context.requests.remove(request_key(request, attempt))
            self._context.requests.add_tombstone(request, attempt, self._context.clock.now_s())
            self._context.outbox.refused(router, request, attempt, error)

    def _run(self, tracked: Tracked, message: w.Submit) -> None:
        """Run a request that has waited for blocks from elsewhere, with or without them."""
        try:
            self._role.submit(tracked, message)
        except TandemError as error:
            self._context.fail(tracked, error)
            return
        if tracked.ended_choices:  # meanwhile
            self._role.end_choices(tracked, frozenset(tracked.ended_choices))

    def _track(self, router: RouterId, message: w.Submit) -> Tracked:
        now_s = self._context.clock.now_s()
        block_tokens = self._context.engine.layout.groups[0].block_tokens
        root = self._context.hash_root(message.salt)
        prompt = prompt_from_wire(message)
        hashes = tuple(chain(root, prompt, block_tokens))
        if message.last_block_hash and hashes[-1:] != (message.last_block_hash,):
            self._context.count("prefix_hash_mismatches")
        sampling = sampling_from_wire(message.sampling)
        sampling.validate(self._context.engine.vocab_size)  # one bad row would fail the whole step
        self._context.engine.prepare(sampling)
        deadline_s = now_s + (message.timeout_s or MAX_REQUEST_S)
        return Tracked(
            router=router,
            request=RequestId(message.request),
            attempt=Attempt(message.attempt),
            deadline_s=deadline_s,
            salt=message.salt,
            trace=message.trace[:TRACE_CHARS],
            engine_request=EngineRequest(
                key=request_key(message.request, message.attempt),
                prompt=prompt,
                sampling=sampling,
                hash_root=root,
                hashes=hashes,
                kind=RequestKind.PREFILL_ONLY if message.leg == w.LEG_PREFILL else RequestKind.FULL,
                arrival_s=now_s,
                deadline_s=deadline_s,
                forced=choices_from_wire(message.forced),
            ),
        )

    def _cancel(self, tracked: Tracked, reason: str) -> None:
        if not self._context.end(tracked):
            return
        self._exchange.cancel(tracked)
        self._role.cancel(tracked, reason)
        self._context.outbox.failed(tracked, CancelledError("the request was cancelled", why=reason))
        self._context.count("requests_cancelled")

    def _end_choices(self, message: w.EndChoices) -> None:
        tracked = self._context.requests.get(request_key(message.request, message.attempt))
        if tracked is not None:
            count = tracked.engine_request.sampling.n
            choices = frozenset(choice for choice in message.choices if choice < count)
            tracked.ended_choices |= choices
            self._role.end_choices(tracked, choices)

    def _expire(self, now_s: float) -> None:
        for tracked in self._context.requests.overdue(now_s):
            self._give_up(tracked, DeadlineError("the request took too long", why="its deadline passed"))

    def _fail_unsent(self) -> None:
        """Fail requests with messages too large to send: their receivers would wait for ever."""
        for unsent in self._context.outbox.take_unsent():
            self._context.count("messages_too_large")
            tracked = self._context.requests.get(unsent.key)
            if tracked is not None:
                self._give_up(tracked, unsent.error)
            elif unsent.router is not None:  # it was the last message for that router
                self._context.outbox.refused(unsent.router, unsent.request, unsent.attempt, unsent.error)

    def _give_up(self, tracked: Tracked, error: TandemError) -> None:
        self._exchange.cancel(tracked)
        self._role.cancel(tracked, error.why)
        self._context.end(tracked)
        self._context.outbox.failed(tracked, error)

    def _inspect(self, number: int) -> e.Looked:
        return e.Looked(
            id=number,
            in_flight=len(self._context.requests),
            leases=len(self.claims()),
            is_idle=self.is_idle(),
            role=self._role.name.value,
        )

    def _new_incarnation(self, begun: e.NewIncarnation) -> None:
        """The worker's lease had lapsed, or it takes another role: everything in flight belongs to the old
        incarnation."""
        for tracked in self._context.requests.all():
            self._cancel(tracked, "the worker registered again")
        self._exchange.new_incarnation()
        incarnation = Incarnation(begun.incarnation)
        self._context.incarnation = incarnation
        self._context.receiver.set_incarnation(incarnation)
        self._context.sender.set_incarnation(incarnation)
        self._leaving = [role for role in self._leaving if not role.is_idle()]
        if begun.role:
            self._take_role(RoleName(begun.role))
        else:  # it may have stood still in a step, and would seem slow until it is asked again
            self._context.engine.pace.forget()

    def _take_role(self, name: RoleName) -> None:
        """Engine, prefix cache and links stay as they are. The role before takes part until its transfers are quiet,
        which they are, unless a peer sent what it may not."""
        if self._create_role is None:
            raise InternalError(f"this step loop cannot take the role {name.value}")
        if not self._role.is_idle():
            self._leaving.append(self._role)
        self._role = self._create_role(name, self._context)
        event(_log, "role taken", role=name)

    # ---- a step ----------------------------------------------------------------------------------------------------

    def _on_layers(self, slices: tuple[PrefillSlice, ...], first_layer: int, last_layer: int) -> None:
        """Inside a step. Tickets are taken from the inbox here, so that pushes overlap with the rest of the step."""
        for item in () if self._deferred.is_full else self._inbox.take(0.0):
            is_ticket = isinstance(item, e.HostToRank) and item.peer.message.HasField("ticket")
            if is_ticket and self._has_lease():
                self._handle(item)
            else:
                self._deferred.append(item)
        hook = self._role.layer_hook
        if hook is not None and self._has_lease():  # layers not pushed now go with the next chunk, or never
            hook(slices, first_layer, last_layer)

    def _step(self) -> bool:
        """Run one step; False if there was nothing that could run."""
        self._pulse.begin_step()
        try:
            result = self._context.engine.step(self._on_layers if self._role.layer_hook is not None else None)
            if result.failed:
                self._context.engine.probe()
        finally:
            self._pulse.end_step()
        self._meter.measure(result)
        if self._has_lease():
            self._after_step(result)
        else:  # it lapsed during the step
            event(_log, "tokens wait for the lease", logging.WARNING, tokens=len(result.outputs))
            self._deferred.append(result)
        self._context.last_step = (result.started_s, result.ended_s)
        return bool(result.outputs or result.prefill_tokens or result.decode_tokens or result.failed)

    def _after_step(self, result: StepResult) -> None:
        for scores in result.prompt_logprobs:
            tracked = self._context.requests.get(scores.key)
            if tracked is not None and scores.key not in result.failed:
                self._context.outbox.prompt_logprobs(tracked, scores)
        self._time_prompts(result)
        self._role.after_step(result)

    def _time_prompts(self, result: StepResult) -> None:
        for part in result.prefilled:
            tracked = self._context.requests.get(part.key)
            if tracked is None:
                continue
            tracked.computing_since_s = tracked.computing_since_s or result.started_s
            if part.is_last:
                tracked.phase_s = result.ended_s - tracked.computing_since_s

    def _has_lease(self) -> bool:
        return self._pulse.has_lease(self._context.clock.now_s(), self._context.incarnation)

    # ---- what goes out ---------------------------------------------------------------------------------------------

    def _publish(self) -> None:
        events = self._context.engine.blocks.take_events()
        for first in range(0, len(events), MAX_EVENTS):  # a pool evicted all at once would not fit the ring
            part = events[first : first + MAX_EVENTS]
            message = e.BlockEvents(
                events=[e.BlockEvent(group=b.group, hash=b.hash, is_removed=not b.is_stored) for b in part]
            )
            self._context.outbox.put(e.RankToHost(events=message))

    def _report(self) -> None:
        now_s = self._context.clock.now_s()
        if now_s - self._last_report_s < REPORT_EVERY_S:
            return
        self._last_report_s = now_s
        self._meter.links.publish()
        report = self._meter.report()
        data = report.SerializeToString(deterministic=True)
        if data != self._last_report:
            self._last_report = data
            self._context.outbox.put(e.RankToHost(load=report))


def _raise_if_lost(item: object) -> None:
    if isinstance(item, Exception):  # a thread of this process, or another rank, cannot go on
        raise item
