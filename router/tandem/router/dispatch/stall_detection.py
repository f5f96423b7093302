"""Stall detection: requests without messages from a living worker, by the time since they last went on. Pure."""

from __future__ import annotations

from tandem.router.dispatch.inflight_request import InFlightRequest
from tandem.router.workers.connection import WorkerLink


def silent_leg(flight: InFlightRequest, now_s: float, stall_s: float) -> WorkerLink | None:
    """The worker, if any, that should have gone on with `flight` for `stall_s` and did not.

    A queue or a prompt may take its time: a prefill worker is silent only if its load report states that it has nothing
    at all to do. A decode worker is silent once there was a token.
    """
    if stall_s <= 0 or now_s - flight.progress_s < stall_s:
        return None
    plan = flight.plan
    prefill = flight.legs.get(plan.prefill or plan.decode)
    if not flight.has_first_tokens:
        return prefill if prefill is not None and prefill.load.in_flight == 0 else None
    return flight.legs.get(plan.decode)
