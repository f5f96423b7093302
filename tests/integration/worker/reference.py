"""Reference answers of transformers."""

from pathlib import Path
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


def clear_answer(folder: Path, prompt: list[int], count: int) -> list[int]:
    """The greedy continuation by the model in `folder` in fp32, with no two candidates so close that the order of a sum
    could swap them."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            best = model(torch.tensor([tokens]), logits_to_keep=1).logits[0, -1].topk(2)
            assert best.values[0] - best.values[1] > 1e-3, "choose another prompt"
            tokens.append(int(best.indices[0]))
    return tokens[len(prompt) :]
