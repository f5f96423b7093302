"""Single steps of the model runner beside transformers: decode at several batch sizes, and a prefill.

Thread CPU time on one thread, so that a busy machine disturbs it little; median of the repetitions, in ms.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from bench.engine.steps import Shape, batch_of
from bench.report import ROOT, Row, arguments_of, publish
from tandem.engine.runner import ModelRunner


def measure(step: Callable[[], object], device: str, repetitions: int) -> float:
    """Median milliseconds of a step; on a CPU of thread time."""
    times = []
    for place in range(repetitions + 5):
        if device == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter() if device == "cuda" else time.thread_time()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        ended = time.perf_counter() if device == "cuda" else time.thread_time()
        if place >= 5:
            times.append(1e3 * (ended - started))
    return statistics.median(times)


class Baseline:
    """The same model in transformers, with its own cache and attention."""

    def __init__(self, folder: Path, dtype: str, device: str) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        self._model = model.to(device)
        self._device = device

    def decode(self, batch: int, context: int) -> float:
        """Median milliseconds of one token for each of `batch` sequences."""
        return measure(self.decode_step(batch, context), self._device, 60)

    def prefill(self, tokens: int) -> float:
        """Median milliseconds of one prompt, with the last token's logits alone."""
        return measure(self.prefill_step(tokens), self._device, 15)

    @torch.inference_mode()
    def decode_step(self, batch: int, context: int) -> Callable[[], None]:
        """One token for each of `batch` sequences with `context` tokens, again at every call."""
        ids = torch.full((batch, context - 1), 5, device=self._device)
        cache = DynamicCache()
        self._model(ids, None, None, cache, use_cache=True)  # by place: its name changes in transformers 5.24

        @torch.inference_mode()
        def step() -> None:
            self._model(ids[:, :1], None, None, cache, use_cache=True)
            cache.crop(-1)

        return step

    def prefill_step(self, tokens: int) -> Callable[[], None]:
        """One prompt, with the last token's logits alone."""
        ids = torch.full((1, tokens), 5, device=self._device)

        @torch.inference_mode()
        def step() -> None:
            self._model(ids, use_cache=True, logits_to_keep=1)

        return step


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = arguments_of("model_step", __doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "tandem-tiny")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--deterministic", action="store_true")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows: list[Row] = []
    for dtype in args.dtype:
        length = max(args.context, args.prefill)
        runner = ModelRunner(
            model_dir=args.model,
            dtype=dtype,
            device=args.device,
            max_model_len=length,
            num_blocks=max(args.batch) * (length // 16 + 1),
            is_deterministic=args.deterministic,
        )
        baseline = Baseline(args.model, dtype, args.device)
        for batch in args.batch:
            step = functools.partial(runner.forward, batch_of(runner, Shape(batch=batch, batch_context=args.context)))
            ours, theirs = measure(step, args.device, 60), baseline.decode(batch, args.context)
            rows.append(Row(dtype, f"decode step, batch {batch}, context {args.context}", ours, "ms", theirs))
        step = functools.partial(runner.forward, batch_of(runner, Shape(tokens=args.prefill)))
        ours, theirs = measure(step, args.device, 15), baseline.prefill(args.prefill)
        rows.append(Row(dtype, f"prefill of {args.prefill} tokens", ours, "ms", theirs))
    publish("model_step", rows, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
