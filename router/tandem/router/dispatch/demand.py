"""Recent demand, unserved requests included: sizes and SLO classes for the planner, never contents."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from tandem.core.demand import MAX_ASKED, DemandSample
from tandem.core.ids import RequestId
from tandem.router.dispatch.inflight_request import GenerationRequest, InFlightRequest
from tandem.router.dispatch.traces import TraceBook


@dataclass(slots=True)
class _Came:
    arrived_s: float
    prompt_tokens: int
    choices: int
    slo: str


class DemandBook:
    """The latest requests; past `limit` the oldest is forgotten. Their outcomes are kept elsewhere."""

    def __init__(self, limit: int = MAX_ASKED) -> None:
        self._limit = limit
        self._came: OrderedDict[str, _Came] = OrderedDict()

    def came(self, request: RequestId, work: GenerationRequest, arrived_s: float) -> None:
        """A request arrived; whether it is served is to be seen."""
        self._came.pop(request, None)
        self._came[request] = _Came(arrived_s, len(work.prompt), work.sampling.n, work.terms.slo)
        if len(self._came) > self._limit:
            self._came.popitem(last=False)

    def asked(
        self, flights: Iterable[InFlightRequest], traces: TraceBook, now_s: float, within_s: float
    ) -> list[DemandSample]:
        """All of the last `within_s`, oldest first. A request without a token, or that has not ended, may have more to
        come."""
        flying = {str(flight.id): flight for flight in flights}
        found: list[DemandSample] = []
        for request, came in self._came.items():
            if came.arrived_s < now_s - within_s:
                continue
            known = flying.get(request) or traces.find(request)
            output_tokens = known.output_tokens if known is not None else 0
            found.append(
                DemandSample(
                    age_s=max(0.0, now_s - came.arrived_s),
                    prompt_tokens=came.prompt_tokens,
                    output_tokens=-(-output_tokens // max(1, came.choices)),
                    cached_tokens=(known.cached_tokens or 0) if known is not None else 0,
                    choices=came.choices,
                    has_ended=request not in flying and output_tokens > 0,
                    slo=came.slo,
                )
            )
        return found
