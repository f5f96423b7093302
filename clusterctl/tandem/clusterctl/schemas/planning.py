"""The documents of `plan` and `simulate`; kinds.py has all others, and the list of kinds."""

from __future__ import annotations

from typing import TypedDict

from tandem.core.config import SloSection


class PlannedWorkers(TypedDict):
    count: int
    hardware: str
    tp: int


class FleetOffer(TypedDict):
    fleet: str
    prefill: PlannedWorkers | None
    decode: PlannedWorkers | None
    mixed: PlannedWorkers | None
    link_bytes_per_s: float
    accelerators: int
    price_per_hour: float
    input_price_per_million: float
    output_price_per_million: float
    attained: float
    reaches_target: bool
    ttft_p90_s: float
    itl_p90_s: float
    prefill_busy: float


class PlannedLoad(TypedDict):
    requests: int
    seconds: float
    rate: float


class PlannedPromise(TypedDict):
    ttft_s: float
    itl_s: float
    target: float
    headroom: float


class PlanDocument(TypedDict):
    requests: str
    planned_for: PlannedLoad
    promised: PlannedPromise
    best: FleetOffer
    neighbours: list[FleetOffer]
    others: list[FleetOffer]
    replays: int


class SplitFigures(TypedDict):
    split: str
    goodput_per_s: float
    attained: float
    ttft_p90_s: float
    tpot_p90_s: float


class SplitSweep(TypedDict):
    requests: str
    rate: float
    calibration: str
    promised: SloSection
    best: str
    splits: list[SplitFigures]


class MapPoint(TypedDict):
    prompt_tokens: int
    output_tokens: int
    load: float
    link_bytes_per_s: float
    rate: float
    by_way: dict[str, float]
    splits: dict[str, str]
    by_split: dict[str, dict[str, float]]
    gain: float
    nearness: float


class DisaggregationMap(TypedDict):
    calibration: str
    workers: int
    promised: SloSection
    points: list[MapPoint]


class SplitForecast(TypedDict):
    split: str
    attained: float
    goodput_per_s: float
    ttft_p90_s: float
    itl_p90_s: float
    prefill_busy: float


class PlannerDeed(TypedDict):
    at_s: float
    what: str


class PlannerWord(TypedDict):
    mode: str
    at_s: float
    version: int
    split: str
    wanted: str
    reason: str
    is_due: bool
    is_advice: bool
    waits_s: float
    requests: int
    routers: int
    link_bytes_per_s: float
    unsettled: str
    now: SplitForecast | None
    then: SplitForecast | None
    last_advice: PlannerDeed | None
    last_action: PlannerDeed | None
    last_denial: PlannerDeed | None


class LivePlan(TypedDict):
    """`plan` is None where the planner has reported nothing for a while, or is off."""

    mode: str
    plan: PlannerWord | None


PLANNED = (PlanDocument, SplitSweep, DisaggregationMap, LivePlan)
