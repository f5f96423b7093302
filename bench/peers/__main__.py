"""A real model on a whole server, beside transformers on the same cores: time to first token, time per token.

One client sends prompts of token ids, each different, so that no cache helps. Tandem is `clusterctl up --mixed 1` with
a thread for each core and `--dtype auto`, over HTTP; transformers runs the same weights in fp32, in this process,
without a server. Both take turns.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from bench.load import ask, body_of, check_served
from bench.report import ROOT, Row, arguments_of, publish
from tandem.controlplane.model_catalog import SMOLLM2
from tandem.controlplane.model_download import pull
from tools.running_cluster import running

TIMEOUT_S = 120.0
TTFT_LIMIT, TOKEN_LIMIT = 1.0, 0.5
"""Of transformers' times."""
_FIRST, _LAST = 300, 40_000
"""Range of token ids: ordinary text, no special tokens."""


@dataclass(slots=True)
class Times:
    """Milliseconds: of each prompt, and of each token after the first."""

    ttft_ms: list[float] = field(default_factory=list)
    token_ms: list[float] = field(default_factory=list)

    def rows(self, case: str, beside: Times | None) -> list[Row]:
        limits: tuple[float | None, float | None] = (None, None)
        if beside is not None:
            limits = (TTFT_LIMIT * statistics.median(beside.ttft_ms), TOKEN_LIMIT * statistics.median(beside.token_ms))
        return [
            Row(case, "ttft_p50", statistics.median(self.ttft_ms), "ms", limits[0]),
            Row(case, "token_p50", statistics.median(self.token_ms), "ms", limits[1]),
        ]


def prompts(seed: int, count: int, tokens: int) -> list[list[int]]:
    """Prompts of that many tokens that share no prefix."""
    dice = random.Random(seed)
    return [[dice.randrange(_FIRST, _LAST) for _ in range(tokens)] for _ in range(count)]


def by_tandem(times: Times, model: Path, every: list[list[int]], tokens: int) -> None:
    """A cluster of one mixed worker; the first prompt is not counted."""
    flags = ("--mixed", "1", "--disaggregation", "never", "--dtype", "auto", "--kv-memory", "1GiB")
    with running("--model", str(model), *flags) as cluster:
        name = json.loads(cluster.get("/v1/models")[1])["data"][0]["id"]
        for number, prompt in enumerate(every):
            body = body_of(prompt, tokens, model=name)
            answer = asyncio.run(ask(cluster.api, body, time.monotonic(), TIMEOUT_S))
            check_served([answer])
            if number:
                times.ttft_ms.append(answer.ttft_s * 1000)
                times.token_ms += [gap * 1000 for gap in answer.gaps_s]


def transformers_model(file: Path) -> Any:
    """transformers' model in fp32 with the numbers that its own reader makes of the GGUF file."""
    library: Any = AutoModelForCausalLM
    load: Any = load_gguf_checkpoint
    model = library.from_config(
        AutoConfig.from_pretrained(file.parent, gguf_file=file.name), dtype=torch.float32
    ).eval()
    model.load_state_dict(load(file, return_tensors=True, model_to_load=model)["tensors"], strict=False)
    model.tie_weights()
    return model


@torch.inference_mode()
def by_transformers(times: Times, model: Any, every: list[list[int]], tokens: int) -> None:
    """Prefill and greedy steps over transformers' own cache; the first prompt is not counted."""
    for number, prompt in enumerate(every):
        took_ms, cache, ids = [], None, torch.tensor([prompt])
        for _ in range(tokens):
            began_s = time.perf_counter()
            out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, ids = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)
            took_ms.append((time.perf_counter() - began_s) * 1000)
        if number:
            times.ttft_ms.append(took_ms[0])
            times.token_ms += took_ms[1:]


def main() -> int:
    parser = arguments_of("peers", __doc__)
    parser.add_argument("--turns", type=int, default=3, help="of each system (default: 3)")
    parser.add_argument("--prompts", type=int, default=4, help="counted in each turn (default: 4)")
    parser.add_argument("--prompt-tokens", type=int, default=409, help="length of each prompt (default: 409)")
    parser.add_argument("--tokens", type=int, default=64, help="generated for each prompt (default: 64)")
    arguments = parser.parse_args()
    path = pull(SMOLLM2, ROOT / "build" / "models")
    torch.set_num_threads(os.cpu_count() or 1)
    theirs = transformers_model(path if path.is_file() else next(path.glob("*.gguf")))
    tandem, transformers = Times(), Times()
    for turn in range(arguments.turns):
        print(f"turn {turn + 1} of {arguments.turns}", flush=True)
        every = prompts(turn, arguments.prompts + 1, arguments.prompt_tokens)
        by_transformers(transformers, theirs, every, arguments.tokens)
        by_tandem(tandem, path, every, arguments.tokens)
    shape = f"{arguments.prompt_tokens} + {arguments.tokens}"
    rows = tandem.rows(f"Tandem, auto, {shape}", transformers) + transformers.rows(f"transformers, fp32, {shape}", None)
    publish("peers", rows, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
