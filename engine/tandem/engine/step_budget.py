"""Measures the prefill speed, and computes how many prompt tokens fit into one step."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.config import SpeculationMode
from tandem.core.errors import ConfigError
from tandem.core.prefill_queue import FIRST_COME, UNMEASURED, PrefillSpeed, QueueRules

_WEIGHT = 0.2  # of the newest measurement in the moving averages
_FADE = 0.998  # weight of an older step in the fit, compared with the one after it
TELLING_TOKENS = 512
"""Prompt tokens before a speed is reported: fewer reflect the fixed cost of a step more."""
WITHOUT_DECODES = 2.5
"""A step without decodes may take so many times `max_step_s`: no stream waits for it, and fewer steps cost less."""
FIXED_SHARE = 1 / 5
"""Largest part of a step without decodes that is fixed cost: longer chunks save little, and others wait for them."""
TELLING_STEP = 64
"""Tokens of a step from which on its prefill rate counts. A smaller step shows the fixed cost instead, of which a rate
would make the next chunk smaller still."""
SHORT_REST = TELLING_STEP - 1
REST_SHARE = 5
"""In a step without decodes a prompt's rest goes with a longer chunk before it if it has SHORT_REST tokens at most, or
one REST_SHARE-th of that chunk's: in a step of its own it would take twice as long, and its prompt waits for it."""
_FORGET = 1.001  # by this the shortest small step grows with each step
_ALIKE = 1e-3  # steps with contexts that differ by less than this part do not show the cost of context


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Budgets of one step.

    `max_step_tokens` and `max_step_s` bound a step; decodes are served first. A step without decodes may take longer
    (see WITHOUT_DECODES), and longer still where it would be mostly fixed cost (see FIXED_SHARE). `max_sequences`
    bounds decodes a step and admitted choices, `chunk_tokens` the prompt tokens of one request a step. `queue` orders
    prompts. `draft_rows`: decodes and drafts in a step with drafts; with more, each one would take about its own time.
    `speculation`: the text that drafts are copied from, beside what grammars force.
    """

    max_step_tokens: int = 512
    max_step_s: float = 0.2
    max_sequences: int = 64
    chunk_tokens: int = 512
    queue: QueueRules = FIRST_COME
    draft_rows: int = 16
    speculation: SpeculationMode = SpeculationMode.PREDICTION

    def __post_init__(self) -> None:
        for name in ("max_step_tokens", "max_step_s", "max_sequences", "chunk_tokens"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}", why="it must be above 0")


class StepPace:
    """Measures steps and sizes chunks.

    Steps without prompt tokens give the cost of decoding, those with many the rate, and the shortest small one the
    fixed cost, which is reading the weights above all; the warm-up has such steps.
    """

    def __init__(self, config: SchedulerConfig, block_tokens: int) -> None:
        self._config, self._block_tokens = config, block_tokens
        self.forget()

    def forget(self) -> None:
        """Reset to the state without measurements."""
        self._decode_s: float | None = None
        self._tokens_per_s: float | None = None
        self._small_rate: float | None = None
        self._fixed_s: float | None = None
        self._fit = _SpeedFit()

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """Moving average of the prefill rate; None before a step of TELLING_STEP prompt tokens."""
        return self._tokens_per_s

    @property
    def prefill_speed(self) -> PrefillSpeed:
        """Speed that predicts the time of a whole prompt; not measured before the first one."""
        return self._fit.speed

    def chunk_budget(self, decodes: int) -> int:
        """Prompt tokens for a step with `decodes` decodes: whole blocks, at least one.

        As many as fit into `max_step_s`, by the rate of small steps until there is another. Without decodes the step
        is longer (see WITHOUT_DECODES and FIXED_SHARE); the first one has no time bound.
        """
        block, rate, left_s = self._block_tokens, self._tokens_per_s, self._config.max_step_s
        tokens = self._config.max_step_tokens - decodes
        if decodes:
            rate, left_s = rate or self._small_rate, left_s - (self._decode_s or 0.0)
        else:
            left_s = max(WITHOUT_DECODES * left_s, (self._fixed_s or 0.0) / FIXED_SHARE)
        if rate is not None:
            tokens = min(tokens, int(left_s * rate) // block * block)
        return max(block, tokens)

    def observe(
        self, prefill_tokens: int, decode_tokens: int, duration_s: float, prefill_attended: float = 0.0
    ) -> None:
        """Learn from a finished step; steps of no measurable duration are ignored. `prefill_attended`: of all its
        chunks (tandem.core.prefill_queue.attended)."""
        if duration_s <= 0:
            return
        if self._fixed_s is not None:
            self._fixed_s *= _FORGET
        if prefill_tokens + decode_tokens < TELLING_STEP:
            self._fixed_s = duration_s if self._fixed_s is None else min(self._fixed_s, duration_s)
        if not prefill_tokens:
            self._decode_s = _blend(self._decode_s, duration_s)
            return
        # An old decode estimate near or above the whole step would make the rate infinite.
        decode_s = min(self._decode_s or 0.0, 0.9 * duration_s) if decode_tokens else 0.0
        rate = prefill_tokens / (duration_s - decode_s)
        if prefill_tokens >= TELLING_STEP or (self._tokens_per_s is not None and rate > self._tokens_per_s):
            self._tokens_per_s = _blend(self._tokens_per_s, rate)
        else:
            self._small_rate = rate
        self._fit.add(prefill_tokens, prefill_attended, duration_s - decode_s)


class _SpeedFit:
    """seconds = a·tokens + b·attended, a > 0 and b ≥ 0, by least squares of relative errors over the latest steps.

    Relative, so that a step that something held up (seconds above what they should be) hardly counts. Each counts by
    its tokens, or the fixed cost of a step would make a worker of short prompts seem slow.
    """

    def __init__(self) -> None:
        self._speed, self._tokens = UNMEASURED, 0
        self._t = self._c = self._tt = self._tc = self._cc = 0.0

    @property
    def speed(self) -> PrefillSpeed:
        return self._speed

    def add(self, tokens: int, attended: float, seconds: float) -> None:
        self._tokens += tokens
        t, c = tokens / seconds, attended / seconds
        self._t, self._c = self._t * _FADE + tokens * t, self._c * _FADE + tokens * c
        self._tt, self._tc = self._tt * _FADE + tokens * t * t, self._tc * _FADE + tokens * t * c
        self._cc = self._cc * _FADE + tokens * c * c
        if self._tokens >= TELLING_TOKENS:
            self._speed = self._solved()

    def _solved(self) -> PrefillSpeed:
        whole = self._tt * self._cc
        determinant = whole - self._tc * self._tc
        if determinant > _ALIKE * whole:
            token_s = (self._t * self._cc - self._c * self._tc) / determinant
            context_s = (self._c * self._tt - self._t * self._tc) / determinant
            if token_s > 0 and context_s >= 0:
                return PrefillSpeed(tokens_per_s=1 / token_s, context_s=context_s)
        return PrefillSpeed(tokens_per_s=self._tt / self._t)


def _blend(average: float | None, value: float) -> float:
    return value if average is None else average + _WEIGHT * (value - average)
