"""How many prompt tokens fit into one step: from the token budget and the measured prefill rate."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.errors import ConfigError
from tandem.core.prefill_queue import FIRST_COME, QueueRules

_WEIGHT = 0.2  # of the newest measurement in the moving averages


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Budgets of one step.

    `max_step_tokens` and `max_step_s` bound a step; decodes are served first. `max_sequences` bounds decodes a step
    and admitted choices, `chunk_tokens` the prompt tokens of one request a step. `queue` orders prompts.
    """

    max_step_tokens: int = 512
    max_step_s: float = 0.2
    max_sequences: int = 64
    chunk_tokens: int = 512
    queue: QueueRules = FIRST_COME

    def __post_init__(self) -> None:
        for name in ("max_step_tokens", "max_step_s", "max_sequences", "chunk_tokens"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}", why="it must be above 0")


class StepPace:
    """Measures steps and sizes chunks. Steps without prompt tokens give the cost of decoding, the others the rate."""

    def __init__(self, config: SchedulerConfig, block_tokens: int) -> None:
        self._config, self._block_tokens = config, block_tokens
        self._decode_s: float | None = None
        self._tokens_per_s: float | None = None

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """Moving average of the prefill rate; None before the first measurement."""
        return self._tokens_per_s

    def chunk_budget(self, decodes: int) -> int:
        """Prompt tokens for a step with `decodes` decodes: whole blocks, at least one."""
        block = self._block_tokens
        tokens = self._config.max_step_tokens - decodes
        if self._tokens_per_s is not None:
            left_s = self._config.max_step_s - (self._decode_s or 0.0 if decodes else 0.0)
            tokens = min(tokens, int(left_s * self._tokens_per_s) // block * block)
        return max(block, tokens)

    def observe(self, prefill_tokens: int, decode_tokens: int, duration_s: float) -> None:
        """Learn from a finished step; steps of no measurable duration are ignored."""
        if duration_s <= 0:
            return
        if not prefill_tokens:
            self._decode_s = _blend(self._decode_s, duration_s)
            return
        # An old decode estimate near or above the whole step would make the rate infinite.
        decode_s = min(self._decode_s or 0.0, 0.9 * duration_s) if decode_tokens else 0.0
        self._tokens_per_s = _blend(self._tokens_per_s, prefill_tokens / (duration_s - decode_s))


def _blend(average: float | None, value: float) -> float:
    return value if average is None else average + _WEIGHT * (value - average)
