"""One request on its way through the simulated cluster, and its final record."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.controlplane.simulator.traces import TraceRequest
from tandem.core.block_hash import BlockHash
from tandem.core.ids import BlockId, WorkerId
from tandem.core.ledger import Holder
from tandem.engine.sequence import RequestState
from tandem.router.routing.plan import Plan


@dataclass(slots=True, kw_only=True)
class SimulatedRequest:
    """Moments are virtual seconds, None = not yet. `prefill` and `decode` are equal where one worker does all."""

    number: int
    request: TraceRequest
    hashes: list[BlockHash]
    """Of the prompt's full blocks."""
    plan: Plan
    prefill: WorkerId
    decode: WorkerId
    state: RequestState | None = None
    """At the worker that computes the prompt."""

    announced_s: float = 0.0
    received_s: float = 0.0
    """By the worker that computes the prompt, before anything is fetched."""
    started_s: float | None = None
    granted_s: float | None = None
    first_token_s: float | None = None
    admitted_s: float | None = None
    decoded_s: float | None = None
    finished_s: float | None = None

    cached_tokens: int = 0
    """Need not be computed: in the cache when the request left the queue, fetched ones among them."""
    fetched_tokens: int = 0
    skipped_tokens: int = 0
    """Need not be moved: the decode worker has them."""
    computed_tokens: int = 0
    pushed_tokens: int = 0
    arrived_s: float = 0.0
    """When the last byte sent so far is there."""
    preemptions: int = 0
    holder: Holder | None = None
    """Of the reservation at the decode worker, with its blocks in `tables`."""
    tables: tuple[list[BlockId], ...] = ()

    @property
    def key(self) -> str:
        return str(self.number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Final figures of a request. `wait_s`: until its first chunk; `ttft_s` and `e2e_s` as the client sees them."""

    arrival_s: float
    wait_s: float
    ttft_s: float
    e2e_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    predicted_tokens: int
    fetched_tokens: int
    skipped_tokens: int
    preemptions: int
    prefill: WorkerId
    decode: WorkerId

    @property
    def tpot_s(self) -> float:
        """Seconds for each token after the first."""
        return (self.e2e_s - self.ttft_s) / max(1, self.output_tokens - 1)


def record(flight: SimulatedRequest) -> Record:
    """Return the record of a finished flight; RuntimeError if it has not finished."""
    started_s, first_s, end_s = flight.started_s, flight.first_token_s, flight.finished_s
    if started_s is None or first_s is None or end_s is None:
        raise RuntimeError(f"request {flight.number} has not finished")
    request = flight.request
    return Record(
        arrival_s=request.arrival_s,
        wait_s=started_s - request.arrival_s,
        ttft_s=first_s - request.arrival_s,
        e2e_s=end_s - request.arrival_s,
        prompt_tokens=request.prompt_tokens,
        output_tokens=request.output_tokens,
        cached_tokens=flight.cached_tokens,
        predicted_tokens=flight.plan.prefill_hit_tokens,
        fetched_tokens=flight.fetched_tokens,
        skipped_tokens=flight.skipped_tokens,
        preemptions=flight.preemptions,
        prefill=flight.prefill,
        decode=flight.decode,
    )


@dataclass(slots=True, kw_only=True)
class WorkerActivity:
    """Work done by one worker in a run."""

    worker: WorkerId
    role: str
    busy_s: float = 0.0
    prefill_step_s: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    requests: int = 0
    steps: int = 0
