"""State that a decode worker needs besides KV blocks to continue a request, and times of the parts of a hand-off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.core.ids import ChoiceIndex
from tandem.core.state_enums import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Log-probability of a token and of the `top` alternatives, as (token id, logprob), best first.

    `rank` is the token's place among all by probability, 1 = the most probable; 0 = not known.
    """

    token: int
    logprob: float
    top: Sequence[tuple[int, float]] = ()
    rank: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceState:
    """One choice of a request as it stands: all output tokens so far. Stop and penalty state follow from them."""

    choice: ChoiceIndex
    tokens: tuple[int, ...]
    finish: FinishReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffTiming:
    """Seconds. `overhead_s` = ticket wait + sample-to-first-step − wire − rest of the step."""

    ticket_wait_s: float
    sample_to_step_s: float
    last_wire_s: float
    step_rest_s: float

    @property
    def overhead_s(self) -> float:
        return max(0.0, self.ticket_wait_s + self.sample_to_step_s - self.last_wire_s - self.step_rest_s)
