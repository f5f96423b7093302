"""What transformers answers."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.integration.worker.pair import MODEL


def reference(prompt: list[int], count: int) -> list[int]:
    """The greedy continuation of a prompt by the bundled model in fp32."""
    model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    return [int(t) for t in out[0, len(prompt) :]]
