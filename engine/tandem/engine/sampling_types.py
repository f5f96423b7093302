"""Inputs and outputs of the choice of a token. Plain values; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.handoff import TokenLogprob
from tandem.engine.choice_sampling import ChoiceSampling


@dataclass(slots=True)
class SampleRow:
    """One token to choose: from logits row `row`, for output `index` of a choice.

    With a `token` none is chosen: that one, of the prompt, is reported as if it had been.
    """

    row: int
    index: int
    sampling: ChoiceSampling
    token: int | None = None


@dataclass(slots=True)
class Sampled:
    """A chosen token. `is_valid` is False if the row held no finite maximum (NaN or infinity)."""

    token: int
    logprob: TokenLogprob | None = None
    is_valid: bool = True
