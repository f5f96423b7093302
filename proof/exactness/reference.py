"""What transformers says, in fp32: log-probabilities after every token of a fixed text."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM


class Reference:
    """One model in transformers. Results are kept, since the same prompts come back under other settings."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._kept: dict[tuple[int, ...], Tensor] = {}

    def logprobs(self, prompt: list[int], output: list[int]) -> Tensor:
        """`[len(output), vocab]` fp32: row i is the distribution that output[i] was drawn from."""
        key = (*prompt, *output)
        if key not in self._kept:
            with torch.inference_mode():
                text = torch.tensor([[*prompt, *output[:-1]]])
                logits = self._model(text, logits_to_keep=len(output)).logits[0]
                self._kept[key] = logits.float().log_softmax(-1)
        return self._kept[key]
