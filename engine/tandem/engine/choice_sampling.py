"""What sampling has to remember of one choice between steps. No tensors; the arithmetic is in sampler and penalties."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from tandem.core.sampling import SamplingParams


class ChoiceSampling:
    """What sampling remembers about one choice: its settings and which tokens it has seen."""

    __slots__ = (
        "choice", "counts", "has_bias", "has_filter", "has_penalty", "is_plain", "new_ids", "params", "prompt",
        "prompt_ids",
    )  # fmt: skip

    def __init__(self, params: SamplingParams, choice: int, prompt: Sequence[int], outputs: Iterable[int] = ()) -> None:
        self.params, self.choice = params, choice
        self.has_penalty = bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0)
        self.has_bias = bool(params.logit_bias)
        self.has_filter = bool(params.top_k or params.top_p < 1.0 or params.min_p > 0.0)
        self.is_plain = params.is_greedy and not self.has_penalty and not self.has_bias and params.logprobs is None
        self.prompt = frozenset(prompt) if params.repetition_penalty != 1.0 else frozenset()
        self.prompt_ids = array("q", sorted(self.prompt))
        self.counts: dict[int, int] = {}
        self.new_ids = array("q")  # output tokens that the prompt does not have
        for token in outputs:
            self.count(token)

    def count(self, token: int) -> None:
        """Take note of an output token."""
        if not self.has_penalty:
            return
        seen = self.counts.get(token, 0)
        self.counts[token] = seen + 1
        if not seen and token not in self.prompt:
            self.new_ids.append(token)
