"""Chooses how many offered tokens are computed as drafts: as many as make most tokens a second.

A draft is a row more of a step, and a token more if it holds. What rows cost is fitted to the steps; how often offers
hold is counted over every output token, drafted or not, so that drafts that were given up come back without a trial.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import tandem.core.metric_names as names
from tandem.core.span_copy import MOST_MATCHED, DraftSource, SpanCopy

MOST_DRAFTS = 15
"""Of a choice in a step."""
_LEAST_GAIN = 1.01
"""Of tokens a second, that drafts promise: what is known of costs is not better."""
_ROW_COST = 0.06
"""Of a step with one row, that another one costs: assumed until steps tell."""
_ROW_WEIGHT = 40.0
"""How many steps, of rows squared, that assumption counts as."""
_STEP_FADE, _OFFER_FADE = 0.98, 0.998
_OWN_WEIGHT = 3.0
"""Offers of its own after which a choice's own rate counts as much as that of all."""
_FIRST = {0: 0.6, 1: 0.3, 2: 0.3, 3: 0.4, 4: 0.5, 6: 0.6, 8: 0.7, 12: 0.8, 16: 0.9}
"""Rates before anything is known, by how many tokens before agree at least."""
_FIRST_WEIGHT = 8.0
_CLASSES = tuple(max(least for least in _FIRST if least <= matched) for matched in range(MOST_MATCHED + 1))


class DraftController:
    """Of one engine. Belongs to the step loop's thread, but for `counters`."""

    def __init__(self) -> None:
        self._rates = {
            (source, least): [_FIRST_WEIGHT, rate * _FIRST_WEIGHT]
            for source in DraftSource
            for least, rate in _FIRST.items()
        }
        self._count = self._rows = self._squares = self._seconds = self._products = 0.0
        self.steps = self.drafts = self.accepted = 0

    def observe_step(self, rows: int, took_s: float) -> None:
        """Learn what a step of so many decodes and drafts, and no prompt, costs."""
        fade = _STEP_FADE
        self._count, self._rows = self._count * fade + 1, self._rows * fade + rows
        self._squares = self._squares * fade + rows * rows
        self._seconds, self._products = self._seconds * fade + took_s, self._products * fade + rows * took_s

    def observe_offer(self, source: DraftSource, matched: int, *, has_held: bool) -> None:
        """Learn from an output token for which one was offered, behind so many `matched` tokens."""
        rate = self._rates[source, _CLASSES[matched]]
        rate[0], rate[1] = rate[0] * _OFFER_FADE + 1, rate[1] * _OFFER_FADE + has_held

    def count_drafts(self, computed: int, accepted: int) -> None:
        """Count the drafts of one choice in a step, and those of them that became tokens of the answer."""
        self.steps, self.drafts, self.accepted = self.steps + 1, self.drafts + computed, self.accepted + accepted

    def counts(self, decodes: int, offers: Sequence[tuple[SpanCopy, int]], room: int) -> list[int]:
        """How many tokens of each offer to draft: at most as many as stand beside it, and `room` of all. `decodes`:
        rows of the step without them."""
        gains = sorted(
            ((gain, which) for which, (span, most) in enumerate(offers) for gain in self._gains(span, min(most, room))),
            reverse=True,
        )
        fixed, row = self._costs()
        chosen, tokens, best = 0, float(decodes), _LEAST_GAIN * decodes / (fixed + row * decodes)
        for number, (gain, _) in enumerate(gains[:room], 1):
            tokens += gain
            rate = tokens / (fixed + row * (decodes + number))
            if rate > best:
                chosen, best = number, rate
        counts = [0] * len(offers)
        for _, which in gains[:chosen]:  # gains of one offer fall, so these are its first ones
            counts[which] += 1
        return counts

    def counters(self) -> dict[str, float]:
        """Counts so far, by the names of their metrics. Any thread."""
        return {
            names.SPEC_DRAFTS: float(self.steps),
            names.SPEC_DRAFT_TOKENS: float(self.drafts),
            names.SPEC_ACCEPTED_TOKENS: float(self.accepted),
        }

    def drafter(self, span: SpanCopy, outputs: Iterable[int]) -> Drafter:
        """Follow one choice, which has these output tokens."""
        for token in outputs:
            span.add(token)
        return Drafter(self, span)

    def _gains(self, span: SpanCopy, most: int) -> list[float]:
        """Of each draft: the probability that it and all before it hold."""
        source, gain, gains = span.source, 1.0, list[float]()
        if source is None:
            return gains
        for place in range(most):
            tried, held = self._rates[source, _CLASSES[min(span.matched + place, MOST_MATCHED)]]
            gain *= (span.held + _OWN_WEIGHT * held / tried) / (span.tried + _OWN_WEIGHT)
            gains.append(gain)
        return gains

    def _costs(self) -> tuple[float, float]:
        """Seconds of a step and of each of its rows, by least squares; (1, _ROW_COST) before any step."""
        if not self._count:
            return 1.0, _ROW_COST
        weight = _ROW_WEIGHT
        count = self._count + weight * _ROW_COST * _ROW_COST
        rows, squares = self._rows - weight * _ROW_COST, self._squares + weight
        determinant = count * squares - rows * rows
        fixed = (self._seconds * squares - self._products * rows) / determinant
        row = (self._products * count - self._seconds * rows) / determinant
        if fixed <= 0 or row < 0:  # by noise
            mean = self._seconds / (self._count + _ROW_COST * self._rows)
            return mean, _ROW_COST * mean
        return fixed, row


class Drafter:
    """The drafts of one choice. Belongs to the step loop's thread."""

    __slots__ = ("_controller", "span")

    def __init__(self, controller: DraftController, span: SpanCopy) -> None:
        self._controller, self.span = controller, span

    def add(self, token: int) -> None:
        """Follow an output token, and learn from it."""
        source, matched = self.span.source, self.span.matched
        has_held = self.span.add(token)
        if source is not None and has_held is not None:
            self._controller.observe_offer(source, matched, has_held=has_held)
