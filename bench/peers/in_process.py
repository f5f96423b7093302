"""transformers without a server, in this process: prefill and greedy steps over its own cache, one prompt at a time."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from bench.load import TimedAnswer
from bench.peers.cases import Case, prompts


def load(file: Path, dtype: str) -> Any:
    """transformers' model with the numbers that its own reader makes of the GGUF file."""
    torch.set_num_threads(os.cpu_count() or 1)
    library: Any = AutoModelForCausalLM
    read: Any = load_gguf_checkpoint
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    model = library.from_config(config, dtype=getattr(torch, dtype)).eval()
    model.load_state_dict(read(file, return_tensors=True, model_to_load=model)["tensors"], strict=False)
    model.tie_weights()
    return model


@torch.inference_mode()
def measure(model: Any, case: Case, seed: int, tokens: int) -> list[TimedAnswer]:
    """Compute the prompts of a case with one client; another one is not counted."""
    answers = []
    for prompt in [[1] * 64, *prompts(case, seed)]:
        cache, ids = None, torch.tensor([prompt])
        answers.append(TimedAnswer(time.monotonic()))
        for _ in range(tokens):
            out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, ids = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)
            answers[-1].token_s.append(time.monotonic())
    return answers[1:]
