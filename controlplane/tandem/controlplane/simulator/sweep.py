"""Sweeps over many simulated clusters: goodput over P:D splits, and when not to disaggregate."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tandem.controlplane.planner.records import RoleSplit
from tandem.controlplane.simulator.calibration import Calibration
from tandem.controlplane.simulator.setup import Setup
from tandem.controlplane.simulator.simulator import Simulator
from tandem.controlplane.simulator.summary import attained, quantile
from tandem.controlplane.simulator.traces import RequestLog
from tandem.controlplane.simulator.workloads import shared_prompt
from tandem.core.config import AdmissionSection, Disaggregation, PolicyName, SloSection
from tandem.core.prefill_queue import QueueRules
from tandem.router.routing.policies import create_policy

Progress = Callable[[int, int], None]
MIXED = "mixed"
"""All workers do both."""
WAYS = (Disaggregation.AUTO.value, Disaggregation.ALWAYS.value, Disaggregation.NEVER.value, MIXED)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRow:
    """One split under one load. Goodput: requests a second that keep their promises."""

    split: RoleSplit
    goodput_per_s: float
    attained: float
    ttft_p90_s: float
    tpot_p90_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A place of the map, and the share of requests that keep their promises there, by way.

    `load`: of the workers' maximum. `by_way`: of every P:D split the best; `splits` names them, `by_split`
    has them all.
    """

    prompt_tokens: int
    output_tokens: int
    load: float
    link_bytes_per_s: float
    rate: float
    by_way: dict[str, float]
    splits: dict[str, str]
    by_split: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def nearness(self) -> float:
        """Ratio of `auto` to the best of the other ways; above 1: `auto` is better."""
        best = max(share for way, share in self.by_way.items() if way != Disaggregation.AUTO.value)
        return self.by_way[Disaggregation.AUTO.value] / best if best else 1.0

    @property
    def gain(self) -> float:
        """Gain of the best split over all-mixed workers, as a share of all requests; below 0: do not disaggregate."""
        return self.by_way[Disaggregation.ALWAYS.value] - self.by_way[MIXED]


class MapPoint(NamedTuple):
    """A place of the map."""

    link_bytes_per_s: float
    load: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """Axes of the map. Every point has `requests` requests on `workers` workers."""

    prompts: Sequence[int] = (256, 1024, 4096, 16384)
    outputs: Sequence[int] = (16, 64, 256, 1024)
    loads: Sequence[float] = (0.4, 0.8)
    links_bytes_per_s: Sequence[float] = (1e9, 20e9)
    workers: int = 4
    requests: int = 150
    seed: int = 1


def setup(calibration: Calibration, split: RoleSplit, promise: SloSection, way: str) -> Setup:
    """Return a cluster under the default policy. `way`: one of WAYS."""
    mode = Disaggregation.AUTO if way == MIXED else Disaggregation(way)
    return Setup(
        policy=create_policy(PolicyName.COST, mode), queue=QueueRules(), admission=AdmissionSection(),
        calibration=calibration, prefill=split.prefill, decode=split.decode, mixed=split.mixed,
        promises={"": promise},
    )  # fmt: skip


def over_splits(
    calibration: Calibration,
    trace: RequestLog,
    workers: int,
    promise: SloSection,
    progress: Progress = lambda done, of: None,
) -> list[SplitRow]:
    """Return every split of so many workers, and all of them mixed, under the same requests."""
    splits = [*(RoleSplit(p, workers - p) for p in range(1, workers)), RoleSplit(0, 0, workers)]
    rows = []
    for number, split in enumerate(splits):
        progress(number, len(splits))
        rows.append(_row(calibration, trace, split, promise))
    progress(len(splits), len(splits))
    return rows


def when_to_disaggregate(
    calibration: Calibration, axes: Axes, promise: SloSection, progress: Progress = lambda done, of: None
) -> list[Point]:
    """Return every point of the map."""
    every = places(axes)
    points = []
    for number, place in enumerate(every):
        progress(number, len(every))
        points.append(point_at(place, calibration, axes, promise))
    progress(len(every), len(every))
    return points


def places(axes: Axes) -> list[MapPoint]:
    """Return all places of the map."""
    every = itertools.product(axes.links_bytes_per_s, axes.loads, axes.prompts, axes.outputs)
    return [MapPoint(*one) for one in every]


def point_at(
    place: MapPoint, calibration: Calibration, axes: Axes, promise: SloSection, ways: Sequence[str] = WAYS
) -> Point:
    """Return the value of every one of `ways` there, on every split of the workers."""
    calibration = dataclasses.replace(calibration, link_bytes_per_s=place.link_bytes_per_s)
    each = most_per_s(calibration, place.prompt_tokens, place.output_tokens, promise.itl_s)
    rate = place.load * axes.workers * each
    trace = shared_prompt(
        requests=axes.requests, rate=rate, shared_tokens=0, own_tokens=place.prompt_tokens,
        output_tokens=place.output_tokens, seed=axes.seed,
    )  # fmt: skip
    by_split = {
        way: {
            str(split): _attained(calibration, trace, split, promise, way) for split in _splits(axes.workers, way)
        }
        for way in ways
    }  # fmt: skip
    best = {way: max(shares, key=lambda split: shares[split]) for way, shares in by_split.items()}
    return Point(
        prompt_tokens=place.prompt_tokens, output_tokens=place.output_tokens, load=place.load,
        link_bytes_per_s=place.link_bytes_per_s, rate=rate, splits=best, by_split=by_split,
        by_way={way: by_split[way][split] for way, split in best.items()},
    )  # fmt: skip


def most_per_s(calibration: Calibration, prompt_tokens: int, output_tokens: int, itl_s: float) -> float:
    """Return requests a second of a worker that never waits: prompts, and steps as full as `itl_s` allows."""
    context = prompt_tokens + output_tokens / 2
    each_s = calibration.decode_sequence_s + calibration.decode_context_s * context
    room = calibration.kv_tokens / (prompt_tokens + output_tokens)
    batch = min(calibration.max_sequences, room)
    if itl_s and each_s:
        batch = min(batch, (itl_s - calibration.decode_step_s) / each_s)
    batch = max(1.0, batch)
    prompt_s = calibration.prefill_step_s + calibration.chunk_s(0, prompt_tokens)
    decode_s = (output_tokens - 1) * (calibration.decode_step_s / batch + each_s)
    return 1 / max(1e-9, prompt_s + decode_s)


def _row(calibration: Calibration, trace: RequestLog, split: RoleSplit, promise: SloSection) -> SplitRow:
    way = MIXED if split.mixed else Disaggregation.AUTO.value
    records = Simulator(setup(calibration, split, promise, way), trace).run().records
    share = attained(records, promise)
    return SplitRow(
        split=split,
        goodput_per_s=share * trace.rate,
        attained=share,
        ttft_p90_s=quantile(sorted(one.ttft_s for one in records), 0.9),
        tpot_p90_s=quantile(sorted(one.tpot_s for one in records if one.output_tokens > 1) or [0.0], 0.9),
    )


def _splits(workers: int, way: str) -> Iterator[RoleSplit]:
    if way == MIXED:
        yield RoleSplit(0, 0, workers)
        return
    yield from (RoleSplit(p, workers - p) for p in range(1, workers))


def _attained(calibration: Calibration, trace: RequestLog, split: RoleSplit, promise: SloSection, way: str) -> float:
    return attained(Simulator(setup(calibration, split, promise, way), trace).run().records, promise)
