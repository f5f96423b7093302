"""Decides whether the workers' roles, or their number, should change. Holds the state of hysteresis, and no clock."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from tandem.controlplane.planner import splits
from tandem.controlplane.planner.records import (
    Decision,
    Forecast,
    Observation,
    ObservedRequest,
    Rates,
    RoleSplit,
    Rules,
)
from tandem.controlplane.planner.split_forecast import forecast
from tandem.core.config import PlannerMode
from tandem.core.errors import ConfigError
from tandem.core.link_speed import rate
from tandem.core.state_enums import RoleName


class Planner:
    """Ask it every few seconds. Its decisions are carried out by other code, visible in the next observation's split.

    It flips before it scales, and never plans more workers than the budget or a split that cannot serve. Where there
    are more already and it may not scale, it advises to stop some, and does nothing else. A split that it did not ask
    for comes from another writer, and is left alone for the cool-down.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self._split: RoleSplit | None = None
        self._changed_s = -math.inf
        self._wish = _Wish()
        self._spare = _Wish()

    def note_change(self, at_s: float) -> None:
        """Note that another writer changed the desired state, `at_s` on the clock of `decide`: the cool-down counts
        from there."""
        self._changed_s = max(self._changed_s, at_s)
        self.forget_wishes()

    def forget_wishes(self) -> None:
        """Forget the pending changes: the time in between was not observed."""
        self._wish, self._spare = _Wish(), _Wish()

    def decide(self, observation: Observation, now_s: float) -> Decision:
        """Decide the split. `now_s` must not go back. Raises ConfigError for a budget that no split fits."""
        rules, current = self.rules, observation.split
        if rules.mode is PlannerMode.OFF:
            return self._stay(now_s, current, "the planner is off")
        if 0 < rules.budget < 2 and not (current.mixed or rules.is_mixed_allowed):
            raise ConfigError(
                f"the planner's budget is {rules.budget}",
                why="a prefill and a decode worker are two",
                todo="raise the budget, or allow mixed workers",
            )
        if self._split is not None and current != self._split:
            self.note_change(now_s)
        self._split = current
        if not observation.is_settled:
            return self._stay(now_s, current, "workers are still changing")
        if not current.can_serve:
            return self._stay(now_s, current, f"{current} cannot serve, so that nothing is known of other splits")
        recent = window(observation.recent, now_s, rules)
        if len(recent) < rules.min_requests:
            self.forget_wishes()
            seen = f"{len(recent)} requests in the last {rules.window_s:g} s are too few"
            return self._stay(now_s, current, f"{seen}: {rules.min_requests} are needed")
        return self._weigh(observation, recent, now_s)

    # ---- the best split --------------------------------------------------------------------------------------------

    def _weigh(self, observation: Observation, recent: list[ObservedRequest], now_s: float) -> Decision:
        rules, current = self.rules, observation.split
        look = _Look(observation, recent)
        now = look.at(current, rules.headroom)
        if 0 < rules.budget < current.total:
            fewer = [look.at(split, rules.headroom) for split in splits.shrunk(current, rules.budget)]
            why = f"{current.total} workers are above the budget of {rules.budget}"
            why += "" if rules.is_scaling else ", and without `is_scaling` an operator has to stop some"
            return self._change(
                look, _first(fewer, current), now_s, why, self._wish, is_advice=not rules.is_scaling
            )  # fmt: skip
        best = self._best(look)
        if best.split != current and best.score - now.score >= rules.min_gain:
            step = splits.towards(current, best.split, max(1, int(rules.most_at_once * current.total)))
            why = _says(now, best, observation.rates, rules) + (f"; {step} is on the way" if step != best.split else "")
            self._spare = _Wish()
            if step == current:
                why = f"{best.split} would be better, but {current} could not serve on the way there"
                return self._stay(now_s, current, why, now=look.at(current, 1.0), considered=look.all())
            gain = best.score - now.score
            return self._change(look, look.at(step, rules.headroom), now_s, why, self._wish, gain=gain)
        if rules.is_scaling and now.attained < rules.target:
            more = self._more(look, now)
            if more is not None:
                self._spare = _Wish()
                why = f"no flip reaches {rules.target:.0%}: " + _says(now, more, observation.rates, rules)
                return self._change(look, more, now_s, why, self._wish)
        self._wish = _Wish()
        if rules.is_scaling and (spared := self._fewer(look)) is not None:
            why = f"fewer workers reach {rules.target:.0%} even at {rules.spare_headroom:g} times the load"
            return self._change(look, spared, now_s, why, self._spare, confirmations=rules.spare_confirmations)
        self._spare = _Wish()
        gain = best.score - now.score
        why = "is the best split" if best.split == current else f"is {gain:.1%} from the best, {best.split}"
        return self._stay(now_s, current, f"{current} {why}", now=look.at(current, 1.0), considered=look.all())

    def _best(self, look: _Look) -> Forecast:
        """Return the best of the present number of workers; each flip has to gain `min_gain`, or one that needs fewer
        is better."""
        current, rules = look.observation.split, self.rules
        options = splits.of_total(current.total, current, is_mixed_allowed=rules.is_mixed_allowed)
        return _first([look.at(split, rules.headroom) for split in options], current, flip=rules.min_gain)

    def _more(self, look: _Look, now: Forecast) -> Forecast | None:
        """Return the fewest workers that reach the target, else those that gain most, within the budget; none flips."""
        current, rules = look.observation.split, self.rules
        found: list[Forecast] = []
        for total in splits.totals(current.total, min(rules.budget, 2 * current.total)):
            best = self._grown(look, total)
            if best.attained >= rules.target:
                return self._fewest(look, found[-1].split.total if found else current.total, best)
            found.append(best)
        best_of_all = max(found, key=lambda one: (one.score, -one.split.total), default=None)
        # Far from the target, more workers only bring all requests nearer to their promises.
        is_better = best_of_all is not None and best_of_all.score - now.score >= rules.min_gain / 4
        return best_of_all if is_better else None

    def _grown(self, look: _Look, total: int) -> Forecast:
        """Return the best of `total` workers for which none flips."""
        current = look.observation.split
        return _first([look.at(split, self.rules.headroom) for split in splits.grown(current, total)], current)

    def _fewest(self, look: _Look, too_few: int, enough: Forecast) -> Forecast:
        """Return the fewest workers that reach the target, between a total that does not and a forecast that does."""
        while enough.split.total - too_few > 1:
            total = (too_few + enough.split.total) // 2
            best = self._grown(look, total)
            if best.attained >= self.rules.target:
                enough = best
            else:
                too_few = total
        return enough

    def _fewer(self, look: _Look) -> Forecast | None:
        """Return the best split of one worker less, if that has capacity to spare."""
        current, rules = look.observation.split, self.rules
        able = [one for one in splits.shrunk(current, current.total - 1) if _keeps_roles(current, one)]
        if not able:
            return None
        best = _first([look.at(split, rules.spare_headroom) for split in able], current)
        return look.at(best.split, rules.headroom) if best.attained >= rules.target else None

    # ---- the decision ----------------------------------------------------------------------------------------------

    def _change(
        self, look: _Look, best: Forecast, now_s: float, why: str, wish: _Wish, *, confirmations: int = 0,
        gain: float = math.inf, is_advice: bool = False,
    ) -> Decision:  # fmt: skip
        rules, current = self.rules, look.observation.split
        wish.again(_direction(current, best.split), gain, now_s)
        waits_s = self._waits_s(now_s)
        needed = confirmations or rules.confirmations
        held = ""
        if waits_s > 0:
            held = f"; the split changed lately: {waits_s:.0f} s to wait"
        elif wish.count < needed:
            held = f"; {wish.count} of {needed} decisions in a row say so"
        elif wish.gained_s < rules.worth_s:
            held = f"; so far that would have been worth {wish.gained_s:.1f} of {rules.worth_s:g} s of all requests"
        is_to_act = not held and rules.mode is PlannerMode.ACT and not is_advice
        if is_to_act:
            self._split = best.split  # its executor changes nothing else
            self._changed_s = now_s
            self._wish, self._spare = _Wish(), _Wish()
        return Decision(
            at_s=now_s, mode=rules.mode, current=current, wanted=best.split, reason=why + held, is_due=not held,
            is_to_act=is_to_act, is_advice=is_advice, waits_s=waits_s, now=look.at(current, 1.0),
            then=look.at(best.split, 1.0), considered=look.all(),
        )  # fmt: skip

    def _stay(
        self, now_s: float, current: RoleSplit, reason: str, now: Forecast | None = None,
        considered: tuple[Forecast, ...] = (),
    ) -> Decision:  # fmt: skip
        return Decision(
            at_s=now_s, mode=self.rules.mode, current=current, wanted=current, reason=reason, now=now, then=now,
            considered=considered, waits_s=self._waits_s(now_s),
        )  # fmt: skip

    def _waits_s(self, now_s: float) -> float:
        """Return seconds until something may be changed again."""
        return max(0.0, self._changed_s + self.rules.cool_down_s - now_s)


def window(recent: Iterable[ObservedRequest], now_s: float, rules: Rules) -> list[ObservedRequest]:
    """Return the requests that count at `now_s`, in the order of arrival: the youngest of them where they are too
    many."""
    found = [one for one in recent if now_s - rules.window_s <= one.arrival_s <= now_s]
    found.sort(key=lambda one: one.arrival_s)
    return found[-rules.max_requests :]


class _Look:
    """Forecasts for one observation, each made once."""

    def __init__(self, observation: Observation, recent: list[ObservedRequest]) -> None:
        self.observation, self._recent = observation, recent
        self._made: dict[tuple[RoleSplit, float], Forecast] = {}

    def at(self, split: RoleSplit, load: float) -> Forecast:
        found = self._made.get((split, load))
        if found is None:
            seen = self.observation
            found = forecast(split, self._recent, seen.rates, seen.promises, load=load)
            self._made[split, load] = found
        return found

    def all(self) -> tuple[Forecast, ...]:
        return tuple(self._made[key] for key in sorted(self._made))


@dataclass(slots=True)
class _Wish:
    """How often in a row the same direction was wanted, and its worth since: shares of all requests times seconds."""

    direction: tuple[int, ...] = ()
    count: int = 0
    gained_s: float = 0.0
    said_s: float = 0.0

    def again(self, direction: tuple[int, ...], gain: float, now_s: float) -> None:
        if direction != self.direction:
            self.direction, self.count, self.gained_s = direction, 0, 0.0
        self.gained_s += gain * (now_s - self.said_s) if self.count and now_s > self.said_s else 0.0
        self.count += 1
        self.said_s = now_s


def _direction(current: RoleSplit, wanted: RoleSplit) -> tuple[int, ...]:
    """Return which roles grow and which shrink: by one or by two workers may differ from one decision to the next."""
    changes = [wanted.of(role) - current.of(role) for role in RoleName]
    return tuple((change > 0) - (change < 0) for change in changes)


def _keeps_roles(current: RoleSplit, split: RoleSplit) -> bool:
    """True if no role loses its last worker."""
    return all(split.of(role) or not current.of(role) for role in RoleName)


def _first(found: Iterable[Forecast], current: RoleSplit, *, flip: float = 0.0) -> Forecast:
    """Return the best, when each flip costs `flip` of the score; of equals the one with the fewest."""

    def rank(one: Forecast) -> tuple[float, int, RoleSplit]:
        flips = current.flips_to(one.split)
        return flip * flips - round(one.score, 3), flips, one.split

    return min(found, key=rank)


def _says(now: Forecast, then: Forecast, rates: Rates, rules: Rules) -> str:
    """Return both in figures, at the load with headroom, and over which links, where KV is moved."""
    links = ""
    if now.split.prefill or then.split.prefill:
        links = f", links of {rate(rates.link_bytes_per_s)}" if rates.wire_token_s else ", no link was measured"
    return (
        f"{then.split} would keep {then.attained:.1%} of the promises and {now.split} {now.attained:.1%}"
        f" at {rules.headroom:g} times the load (TTFT p90 {then.ttft_p90_s:.2f} against {now.ttft_p90_s:.2f} s,"
        f" time per token {1000 * then.itl_p90_s:.0f} against {1000 * now.itl_p90_s:.0f} ms{links})"
    )
