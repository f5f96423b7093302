"""Setup of a simulation: the cluster, its policy and its queue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tandem.controlplane.planner.records import Rules
from tandem.controlplane.simulator.calibration import Calibration
from tandem.core.config import AdmissionSection, SloSection
from tandem.core.prefill_queue import FIRST_COME, QueueRules
from tandem.router.routing.plan import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """`queue`: the order of prompts at all workers. `is_fetching`: workers get prefixes from each other where that is
    sooner than computing them. `admission`: rules by which the router queues requests while workers have no capacity;
    None = it sends all at once. No request is rejected. `routers` take the requests by turns; each knows its own
    dispatches at once, the prompts that the others send 2 ms later, and their load by the workers' reports.

    `max_tokens` is the most that clients ask for: the length of an answer is unknown before it ends. None = just
    as many as each answer has, for clients that know.

    `promises`: SLO classes; requests of a trace are of the class "". `planner`: by which rules workers change their
    roles, None = never; it is asked every `plan_every_s`. A flip takes `flip_s` beside its drain.
    """

    policy: Policy
    queue: QueueRules = FIRST_COME
    prefill: int = 0
    decode: int = 0
    mixed: int = 0
    calibration: Calibration = field(default_factory=Calibration)
    max_tokens: int | None = 2048
    is_fetching: bool = True
    admission: AdmissionSection | None = None
    routers: int = 1
    promises: Mapping[str, SloSection] = field(default_factory=dict)
    planner: Rules | None = None
    plan_every_s: float = 10.0
    flip_s: float = 0.5
