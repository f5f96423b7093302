"""Prices the risk of missing an SLO, in seconds: a request that misses it is worth nothing of what it took.

An SLO class promises a time to the first token, and one for each token after it, on average over an answer. Answers are
of all lengths (exponential, as far as a mean shows): a pause that a long one makes up for breaks the promise of a short
one. Pure arithmetic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

UNSURE = 0.25
"""Relative error of predictions of a promised time, up or down: the width of the step from kept to broken."""
_LEAST_SPARE = 0.1
"""Least share of an answer's promised time that it is taken to have to spare: else one more delay cost nothing."""


@dataclass(frozen=True, slots=True)
class SloPromise:
    """`ttft_s`: from now to the first token, below 0 = it is late already. `itl_s`: for each token after it. inf =
    nothing is promised. `answer_tokens`: of an answer on average. `given_s`: the time to the first token as promised
    when the request came."""

    ttft_s: float
    itl_s: float
    answer_tokens: float
    given_s: float

    @property
    def worth_s(self) -> float:
        """The time that was promised for the whole request: it is lost with the promise."""
        answer_s = self.answer_tokens * self.itl_s
        return sum(part_s for part_s in (self.given_s, answer_s) if part_s < math.inf)

    def late(self, first_token_s: float) -> float:
        """Probability that a first token that is predicted for then comes too late."""
        if self.ttft_s == math.inf or self.ttft_s <= 0:
            return 0.0 if self.ttft_s > 0 else 1.0
        return _step(first_token_s / self.ttft_s)

    def slowed(self, token_s: float) -> float:
        """Probability that tokens that take so long each are too slow."""
        return _step(token_s / self.itl_s) if self.itl_s < math.inf else 0.0

    def paused(self, pause_s: float, token_s: float, answers: float = 1.0) -> float:
        """The share of answers that do not make up for a pause. Their tokens take `token_s` each. Those of `answers`
        times the mean length: an answer that is met while it is written is a long one, as a rule."""
        if self.itl_s == math.inf or not pause_s:
            return 0.0
        spare_s = max(self.itl_s - token_s, _LEAST_SPARE * self.itl_s) * self.answer_tokens * answers
        return 1 - math.exp(-pause_s / spare_s)


def _step(ratio: float) -> float:
    """0 well below 1, 1 well above it."""
    return min(1.0, max(0.0, (ratio - 1 + UNSURE) / (2 * UNSURE)))
