"""What a rank has to say: tokens gathered over one step into one message a router, everything else in order."""

from __future__ import annotations

from collections.abc import Callable

from tandem.core.errors import TandemError
from tandem.core.handoff import HandoffTiming
from tandem.core.ids import Incarnation, RouterId, WorkerId
from tandem.core.lifecycle import Phase
from tandem.engine.request import TokenOutput
from tandem.rpc.v1 import engine_pb2 as e
from tandem.rpc.v1 import worker_pb2 as w
from tandem.workerhost.requests import Tracked
from tandem.workerhost.wire import chunk_to_wire, timing_to_wire


class Outbox:
    """Collects messages for the host; `send` takes one serialised RankToHost message and may block briefly."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._tokens: dict[RouterId, w.StepTokens] = {}

    def token(
        self, tracked: Tracked, output: TokenOutput, *, cached_tokens: int | None, handoff: HandoffTiming | None
    ) -> None:
        """Add one token of a request to what its router gets at the next flush."""
        chunk = chunk_to_wire(output, tracked.request, tracked.attempt)
        if cached_tokens is not None:
            chunk.cached_tokens = cached_tokens
        if handoff is not None:
            chunk.handoff.CopyFrom(timing_to_wire(handoff))
        self._tokens.setdefault(tracked.router, w.StepTokens()).chunks.append(chunk)

    def phase(self, tracked: Tracked, phase: Phase) -> None:
        message = w.RequestPhase(request=tracked.request, attempt=tracked.attempt, phase=phase.value)
        self.to_router(tracked.router, w.WorkerMessage(phase=message))

    def failed(self, tracked: Tracked, error: TandemError) -> None:
        self.refused(tracked.router, tracked.request, tracked.attempt, error)

    def refused(self, router: RouterId, request: str, attempt: int, error: TandemError) -> None:
        """An attempt ends with an error; tokens already gathered go first."""
        self.flush()
        message = w.RequestFailed(request=request, attempt=attempt, code=error.code, message=error.message)
        self.to_router(router, w.WorkerMessage(failed=message))

    def to_router(self, router: RouterId, message: w.WorkerMessage) -> None:
        self.put(e.RankToHost(router=e.ToRouter(router=router, message=message)))

    def to_peer(self, worker: WorkerId, incarnation: Incarnation, message: w.PeerMessage, *, address: str = "") -> None:
        """Speak to another worker. `address` is dialled if there is no channel yet; "" answers on the one it opened."""
        to = e.ToPeer(worker=worker, incarnation=incarnation, address=address, message=message)
        self.put(e.RankToHost(peer=to))

    def put(self, message: e.RankToHost) -> None:
        self._send(message.SerializeToString())

    def flush(self) -> None:
        """Send the tokens gathered so far, one message a router."""
        if not self._tokens:
            return
        for router, tokens in self._tokens.items():
            self.to_router(router, w.WorkerMessage(tokens=tokens))
        self._tokens.clear()
