"""A rank's outgoing messages: tokens gathered over one step into one message a router, everything else in order."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from tandem.core.errors import RequestTooLargeError, TandemError
from tandem.core.handoff import HandoffTiming
from tandem.core.ids import Attempt, Incarnation, RequestId, RouterId, WorkerId
from tandem.core.logs import event
from tandem.core.proto_mapping import to_proto
from tandem.core.state_enums import Phase
from tandem.engine.request import PromptLogprobs, TokenOutput
from tandem.rpc.v1 import engine_pb2 as e
from tandem.rpc.v1 import generation_pb2 as g
from tandem.rpc.v1 import worker_pb2 as w
from tandem.workercore.message_ring import MessageTooLargeError
from tandem.workercore.proto_convert import add_chunk, add_prompt_chunk
from tandem.workercore.requests import Tracked, request_key

_log = logging.getLogger(__name__)
MAX_REASON_CHARS = 10_000


@dataclass(frozen=True, slots=True)
class Unsent:
    """An attempt with a message that could not be sent. `router`: its receiver; None = another worker."""

    router: RouterId | None
    request: RequestId
    attempt: Attempt
    error: RequestTooLargeError

    @property
    def key(self) -> str:
        return request_key(self.request, self.attempt)


class Outbox:
    """Collects messages for the host; `send` takes one serialised RankToHost message and may block briefly.

    A message that `send` refuses with MessageTooLargeError is dropped; `take_unsent` names the request that this costs.
    """

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._tokens: dict[RouterId, e.RankToHost] = {}  # in the form in which they are sent, so without a copy
        self._unsent: list[Unsent] = []

    def token(
        self, tracked: Tracked, output: TokenOutput, *, cached_tokens: int | None, handoff: HandoffTiming | None
    ) -> None:
        """Add one token of a request to its router's message of the next flush."""
        chunk = add_chunk(self._tokens_for(tracked.router).chunks, output, tracked.request, tracked.attempt)
        if cached_tokens is not None:
            chunk.cached_tokens, chunk.phase_s = cached_tokens, tracked.phase_s
        if handoff is not None:
            chunk.handoff.CopyFrom(to_proto(g.HandoffTiming, handoff))
            chunk.phase_s = tracked.phase_s

    def prompt_logprobs(self, tracked: Tracked, scores: PromptLogprobs) -> None:
        """Add log-probabilities of a request's prompt to its router's message of the next flush, ahead of tokens."""
        add_prompt_chunk(self._tokens_for(tracked.router).prompts, scores, tracked.request, tracked.attempt)

    def phase(self, tracked: Tracked, phase: Phase) -> None:
        message = w.RequestPhase(request=tracked.request, attempt=tracked.attempt, phase=phase.value)
        self.to_router(tracked.router, w.WorkerMessage(phase=message))

    def failed(self, tracked: Tracked, error: TandemError) -> None:
        self.refused(tracked.router, tracked.request, tracked.attempt, error)

    def refused(self, router: RouterId, request: str, attempt: int, error: TandemError) -> None:
        """An attempt ends with an error; tokens already gathered go first."""
        self.flush()
        reason = error.message[:MAX_REASON_CHARS]
        message = w.RequestFailed(request=request, attempt=attempt, code=error.code, message=reason)
        self.to_router(router, w.WorkerMessage(failed=message))

    def to_router(self, router: RouterId, message: w.WorkerMessage) -> None:
        to = e.ToRouter(router=router, message=message, may_wait=message.HasField("phase"))
        self.put(e.RankToHost(router=to))

    def to_peer(self, worker: WorkerId, incarnation: Incarnation, message: w.PeerMessage, *, address: str = "") -> None:
        """Send to another worker. `address` is dialled if there is no channel yet; "" answers on the one that it
        opened."""
        to = e.ToPeer(worker=worker, incarnation=incarnation, address=address, message=message)
        self.put(e.RankToHost(peer=to))

    def refuse_ticket(self, peer: WorkerId, ticket: w.Ticket) -> None:
        """Answer a ticket that came too late, or that was not asked for."""
        why = "no request waits for this ticket"
        refused = transfer_failed(ticket.request, ticket.attempt, ticket.transfer, "cancelled", why)
        self.to_peer(peer, Incarnation(ticket.receiver_incarnation), refused)

    def put(self, message: e.RankToHost) -> None:
        data = message.SerializeToString()
        try:
            self._send(data)
        except MessageTooLargeError as error:
            self._drop(message, error)

    def take_unsent(self) -> list[Unsent]:
        """Return the attempts with unsent messages since the last call: these cannot go on."""
        unsent, self._unsent = self._unsent, []
        return unsent

    def flush(self) -> None:
        """Send the tokens gathered so far, one message a router."""
        if not self._tokens:
            return
        for message in self._tokens.values():
            self.put(message)
        self._tokens.clear()

    def _tokens_for(self, router: RouterId) -> w.StepTokens:
        message = self._tokens.get(router)
        if message is None:
            message = self._tokens[router] = e.RankToHost()
            message.router.router = router
        return message.router.message.tokens

    def _drop(self, message: e.RankToHost, error: MessageTooLargeError) -> None:
        parts = _parts(message.router.message.tokens)
        if len(parts) > 1:  # each on its own: only parts that are too large by themselves are lost
            for part in parts:
                self.to_router(RouterId(message.router.router), w.WorkerMessage(tokens=part))
            return
        said = _said(message)
        kind = str(message.WhichOneof("kind") if said is None else said.WhichOneof("kind"))
        event(_log, "message too large", logging.ERROR, kind=kind, why=str(error))
        about = None if said is None else _about(said)
        if about is not None:
            router = RouterId(message.router.router) if message.HasField("router") else None
            why = f"{error} to the worker's host"
            too_large = RequestTooLargeError(f"a {kind} message about the request is too large", why=why)
            self._unsent.append(Unsent(router, *about, too_large))


def transfer_failed(request: str, attempt: int, transfer: int, code: str, message: str = "") -> w.PeerMessage:
    """Build the message with which either end gives a transfer up (0: no ticket yet): the other fences and releases."""
    failed = w.TransferFailed(request=request, attempt=attempt, transfer=transfer, code=code, message=message)
    return w.PeerMessage(failed=failed)


def _parts(tokens: w.StepTokens) -> list[w.StepTokens]:
    """The part of a step for each choice, and for each prompt, by itself."""
    prompts = [w.StepTokens(prompts=[prompt]) for prompt in tokens.prompts]
    return prompts + [w.StepTokens(chunks=[chunk]) for chunk in tokens.chunks]


def _said(message: e.RankToHost) -> w.WorkerMessage | w.PeerMessage | None:
    """The message for a router or a worker; None = it was for the host."""
    if message.HasField("router"):
        return message.router.message
    return message.peer.message if message.HasField("peer") else None


def _about(said: w.WorkerMessage | w.PeerMessage) -> tuple[RequestId, Attempt] | None:
    """The attempt that it is about; None = none."""
    kind = str(said.WhichOneof("kind"))
    record = getattr(said, kind)
    if kind == "tokens":
        record = (*record.prompts, *record.chunks)[0]
    is_about_one = "attempt" in record.DESCRIPTOR.fields_by_name
    return (RequestId(record.request), Attempt(record.attempt)) if is_about_one else None
