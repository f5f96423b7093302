"""Finds the workers that a load needs, before there are any: kinds of machines and links, TP, both counts, by price.

For every pair of kinds the cheapest counts are on a staircase: with a prefill worker more, no more decode workers are
needed than before. Walking it takes a few replays a step, where trying every count takes all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from tandem.controlplane.planner.records import Forecast, ObservedRequest, Rates, RoleSplit
from tandem.controlplane.planner.split_forecast import forecast
from tandem.core.config import SloSection

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerKind:
    """One kind of worker: `tp` accelerators of a hardware class, each at `price` an hour. `network`: its network, where
    there are several to choose from; only workers on the same one are a pair."""

    hardware: str
    tp: int
    rates: Rates
    price: float = 1.0
    network: str = ""

    @property
    def worker_price(self) -> float:
        return self.price * self.tp

    def __str__(self) -> str:
        return f"{self.hardware}×{self.tp}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """`prefill` None = `decode` workers of the kind `decode` serve all phases by themselves (mixed)."""

    decode: WorkerKind
    decode_count: int
    prefill: WorkerKind | None = None
    prefill_count: int = 0

    @property
    def split(self) -> RoleSplit:
        return RoleSplit(self.prefill_count, self.decode_count) if self.prefill else RoleSplit(0, 0, self.decode_count)

    @property
    def accelerators(self) -> int:
        return self.decode.tp * self.decode_count + (self.prefill.tp * self.prefill_count if self.prefill else 0)

    @property
    def price(self) -> float:
        """Price of an hour of the whole fleet."""
        more = self.prefill.worker_price * self.prefill_count if self.prefill else 0.0
        return self.decode.worker_price * self.decode_count + more

    @property
    def link_bytes_per_s(self) -> float:
        """Speed of the slower end; 0 = not known."""
        ends = [kind.rates.link_bytes_per_s for kind in (self.prefill, self.decode) if kind is not None]
        return min((speed for speed in ends if speed), default=0.0)

    @property
    def kinds(self) -> tuple[str, str, str]:
        """Kinds of its workers, regardless of their counts."""
        return str(self.prefill), str(self.decode), self.decode.network

    def __str__(self) -> str:
        """Such as "3P h100×1 + 2D l40s×2"."""
        if self.prefill is None:
            return f"{self.decode_count}M {self.decode}"
        return f"{self.prefill_count}P {self.prefill} + {self.decode_count}D {self.decode}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTargets:
    """Requirements on a fleet: the requests, their promises, and the share of them that has to be kept at `headroom`
    times their rate, with at most so many `accelerators`."""

    requests: Sequence[ObservedRequest]
    promises: Mapping[str, SloSection]
    target: float = 0.95
    headroom: float = 1.1
    accelerators: int = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A fleet, its forecast at `headroom`, and the cost of a million tokens: input is the prefill workers' cost,
    output the decode workers'; mixed workers' cost is divided by the time that they spend on each."""

    fleet: Fleet
    forecast: Forecast
    reaches_target: bool
    input_price: float
    output_price: float

    @property
    def order(self) -> tuple[bool, float, float]:
        """Sort key: the cheapest that reaches the target; if none does, the nearest to it."""
        if self.reaches_target:
            return (False, self.fleet.price, -self.forecast.score)
        return (True, -self.forecast.score, self.fleet.price)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """`neighbours`: of the best, one worker more, fewer or flipped; `others`: the best of every other pair of kinds."""

    best: Offer
    neighbours: tuple[Offer, ...]
    others: tuple[Offer, ...]
    replays: int


class Search:
    """`progress` is called with (done, in all) pairs of kinds."""

    def __init__(
        self,
        wanted: PlanTargets,
        kinds: Sequence[WorkerKind],
        progress: Callable[[int, int], None] = lambda done, of: None,
    ) -> None:
        self._wanted, self._kinds, self._progress = wanted, kinds, progress
        self._made: dict[tuple[str, str, str, RoleSplit], Forecast] = {}
        requests = wanted.requests
        span_s = max(requests[-1].arrival_s - requests[0].arrival_s, 1e-9)
        self._input_per_h = sum(one.prompt_tokens for one in requests) / span_s * HOUR_S
        self._output_per_h = sum(one.output_tokens for one in requests) / span_s * HOUR_S

    def run(self) -> PlanResult:
        """Run the search; ValueError if there are no kinds, or no fleet of them fits the number of accelerators."""
        pairs: list[tuple[WorkerKind | None, WorkerKind]] = [(None, kind) for kind in self._kinds]
        pairs += [
            (prefill, decode) for prefill in self._kinds for decode in self._kinds if prefill.network == decode.network
        ]
        found: list[Offer] = []
        for number, (prefill, decode) in enumerate(pairs):
            self._progress(number, len(pairs))
            if prefill is None:
                found += self._mixed(decode)
            else:
                found += self._staircase(prefill, decode)
        self._progress(len(pairs), len(pairs))
        if not found:
            raise ValueError("no fleet fits the number of accelerators")
        found.sort(key=lambda offer: offer.order)
        best = found[0]
        return PlanResult(
            best=best,
            neighbours=tuple(sorted(self._neighbours(best.fleet), key=lambda offer: offer.order)),
            others=tuple(_first_of_each_kind(found[1:], best)),
            replays=len(self._made),
        )

    def offer(self, fleet: Fleet) -> Offer:
        """Return the forecast and cost of this fleet."""
        predicted = self._forecast(fleet)
        if fleet.prefill is None:
            input_share = min(1.0, predicted.prefill_busy)
            input_price, output_price = fleet.price * input_share, fleet.price * (1 - input_share)
        else:
            output_price = fleet.decode.worker_price * fleet.decode_count
            input_price = fleet.price - output_price
        return Offer(
            fleet=fleet, forecast=predicted, reaches_target=predicted.attained >= self._wanted.target,
            input_price=1e6 * input_price / max(self._input_per_h, 1e-9),
            output_price=1e6 * output_price / max(self._output_per_h, 1e-9),
        )  # fmt: skip

    def _forecast(self, fleet: Fleet) -> Forecast:
        prefill, decode, network = fleet.kinds
        key = (prefill, decode, network if fleet.prefill else "", fleet.split)
        found = self._made.get(key)
        if found is None:
            wanted, computing = self._wanted, fleet.prefill or fleet.decode
            found = self._made[key] = forecast(
                fleet.split, wanted.requests, computing.rates, wanted.promises, load=wanted.headroom,
                decode_rates=fleet.decode.rates,
            )  # fmt: skip
        return found

    def _mixed(self, kind: WorkerKind) -> Iterator[Offer]:
        most = self._wanted.accelerators // kind.tp
        if most < 1:
            return
        count = _least(1, most, lambda n: self.offer(Fleet(decode=kind, decode_count=n)).reaches_target)
        yield self.offer(Fleet(decode=kind, decode_count=count or most))

    def _staircase(self, prefill: WorkerKind, decode: WorkerKind) -> Iterator[Offer]:
        budget = self._wanted.accelerators

        def offer(p: int, d: int) -> Offer:
            return self.offer(Fleet(prefill=prefill, prefill_count=p, decode=decode, decode_count=d))

        def most(count: int, tp: int, other: int) -> int:
            return (budget - count * tp) // other

        if budget < prefill.tp + decode.tp:
            return
        prefills = range(1, most(1, decode.tp, prefill.tp) + 1)
        # No number of prefill workers makes fewer decode workers do.
        fewest = _least(
            1, most(1, prefill.tp, decode.tp),
            lambda d: offer(max(1, most(d, decode.tp, prefill.tp)), d).reaches_target,
        ) or 1  # fmt: skip
        best_price = math.inf
        high: int | None = None
        for p in prefills:
            if p * prefill.worker_price + fewest * decode.worker_price >= best_price:
                return
            room = most(p, prefill.tp, decode.tp)
            high = _least(fewest, min(room, high or room), partial(_reaches, offer, p))
            if high is not None:
                best_price = min(best_price, offer(p, high).fleet.price)
                yield offer(p, high)
        if best_price == math.inf:
            yield from (offer(p, most(p, prefill.tp, decode.tp)) for p in prefills)

    def _neighbours(self, fleet: Fleet) -> Iterator[Offer]:
        p, d = fleet.prefill_count, fleet.decode_count
        if fleet.prefill is None:
            beside = [Fleet(decode=fleet.decode, decode_count=n) for n in (d - 1, d + 1)]
        else:
            counts = [(p - 1, d), (p + 1, d), (p, d - 1), (p, d + 1), (p - 1, d + 1), (p + 1, d - 1)]
            beside = [
                Fleet(prefill=fleet.prefill, prefill_count=one, decode=fleet.decode, decode_count=other)
                for one, other in counts
            ]
        able = [one for one in beside if one.split.can_serve and one.accelerators <= self._wanted.accelerators]
        return (self.offer(one) for one in able)


def _reaches(offer: Callable[[int, int], Offer], prefill: int, decode: int) -> bool:
    return offer(prefill, decode).reaches_target


def _least(low: int, high: int, is_enough: Callable[[int], bool]) -> int | None:
    """Return the smallest from `low` to `high` that is enough, None if not even `high` is; more is taken to be no
    worse."""
    if high < low or not is_enough(high):
        return None
    while low < high:
        middle = (low + high) // 2
        if is_enough(middle):
            high = middle
        else:
            low = middle + 1
    return low


def _first_of_each_kind(offers: Iterable[Offer], best: Offer) -> Iterator[Offer]:
    """Yield the first offer of each pair of kinds but that of `best`; `offers` are sorted, best first."""
    seen = {best.fleet.kinds}
    for offer in offers:
        if offer.fleet.kinds not in seen:
            seen.add(offer.fleet.kinds)
            yield offer
