"""Reference results of transformers: log-probabilities after every token of a fixed text, in fp32 if not asked
otherwise."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from proof.exactness.router_gap import CLEAR, RouterGap


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
