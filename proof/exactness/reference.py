"""Reference results of transformers: log-probabilities after every token of a fixed text, in fp32 if not asked
otherwise."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

CLEAR = 1e-5
"""Between the logits of the last expert taken and the best one left: ten times what the order of fp32 sums changes."""


class Reference:
    """One model in transformers. Results are kept, since the same prompts come back under other settings."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self._greedy: dict[tuple[int, ...], list[int]] = {}
        self._kept: dict[tuple[int, ...], Tensor] = {}
        self._unclear: set[tuple[int, ...]] = set()
        self._gap = RouterGap(self._model)

    def logprobs(self, prompt: list[int], output: list[int]) -> Tensor:
        """`[len(output), vocab]` fp32: row i is the distribution that output[i] was drawn from."""
        key = (*prompt, *output)
        if key not in self._kept:
            self._gap.smallest = math.inf
            with torch.inference_mode():
                text = torch.tensor([[*prompt, *output[:-1]]])
                logits = self._model(text, logits_to_keep=len(output)).logits[0]
                self._kept[key] = logits.float().log_softmax(-1)
            if self._gap.smallest < CLEAR:
                self._unclear.add(key)
        return self._kept[key]

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """The model's own answer of `count` tokens."""
        answer = self._greedy.setdefault(tuple(prompt), [])
        with torch.inference_mode():
            while len(answer) < count:
                text = torch.tensor([[*prompt, *answer]])
                answer.append(int(self._model(text, logits_to_keep=1).logits[0, -1].argmax()))
        return answer[:count]

    def is_clear(self, prompt: list[int], output: list[int]) -> bool:
        """True if no router of a mixture of experts was near to choosing otherwise, in a text asked for before."""
        return (*prompt, *output) not in self._unclear


class RouterGap:
    """Watches how clearly the routers of `model` choose; of experts nearly alike, rounding may choose the other.

    `smallest` is of everything computed since it was last set to infinity.
    """

    def __init__(self, model: nn.Module) -> None:
        self.smallest = math.inf
        for module in model.modules():
            if type(module).__name__.lower().endswith("topkrouter"):
                module.register_forward_hook(self._look)

    def _look(self, router: Any, _given: Any, made: tuple[Tensor, ...]) -> None:
        for scores, taken in _choices(router, made[0].float()):
            best = scores.topk(taken + 1, -1).values
            self.smallest = min(self.smallest, float((best[..., -2] - best[..., -1]).min()))


def _choices(router: Any, logits: Tensor) -> Iterator[tuple[Tensor, int]]:
    """The scores of each choice, and how many were taken: of groups of experts, where there are some, then of
    experts."""
    groups, kept = getattr(router, "num_group", None) or 1, getattr(router, "topk_group", None) or 1
    correction = getattr(router, "e_score_correction_bias", None)
    if correction is not None:
        logits = logits.sigmoid() + correction
    if kept < groups:
        members = logits.view(*logits.shape[:-1], groups, -1)
        of_groups = members.amax(-1) if correction is None else members.topk(2, -1).values.sum(-1)
        yield of_groups, kept
        left = torch.ones_like(of_groups, dtype=torch.bool).scatter_(-1, of_groups.topk(kept, -1).indices, value=False)
        logits = members.masked_fill(left[..., None], float("-inf")).flatten(-2)
    yield logits, router.top_k
