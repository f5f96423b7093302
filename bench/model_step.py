"""Times single steps of the model runner on this machine: decode at several batch sizes, and a prefill.

    python bench/model_step.py --dtype float32 bfloat16

Thread CPU time on one thread, so that a busy machine disturbs it little; median and best of the repetitions, in ms.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

from tandem.engine.runner import ModelRunner, SeqSlice, StepBatch

ROOT = Path(__file__).resolve().parent.parent


def decode_batch(runner: ModelRunner, batch: int, context: int) -> StepBatch:
    """One token of each of `batch` sequences with `context` tokens stored."""
    blocks = runner.layout.groups[0].blocks_for(context)
    tables = [range(place * blocks, (place + 1) * blocks) for place in range(batch)]
    sequences = [SeqSlice(1, context, (table,)) for table in tables]
    return StepBatch([5] * batch, [context - 1] * batch, sequences, list(range(batch)))


def prefill_batch(runner: ModelRunner, tokens: int) -> StepBatch:
    """The first chunk of one prompt, whose last logits are wanted."""
    table = range(runner.layout.groups[0].blocks_for(tokens))
    ids = [place % runner.vocab_size for place in range(tokens)]
    return StepBatch(ids, list(range(tokens)), [SeqSlice(tokens, tokens, (table,))], [tokens - 1])


def measure(runner: ModelRunner, batch: StepBatch, repetitions: int) -> tuple[float, float]:
    """Median and best time of a step in ms."""
    times = []
    for place in range(repetitions + 5):
        if runner.device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter() if runner.device.type == "cuda" else time.thread_time()
        runner.forward(batch)
        if runner.device.type == "cuda":
            torch.cuda.synchronize()
        ended = time.perf_counter() if runner.device.type == "cuda" else time.thread_time()
        if place >= 5:
            times.append(1e3 * (ended - started))
    return statistics.median(times), min(times)


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "tandem-tiny")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--deterministic", action="store_true")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
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
        for batch in args.batch:
            median, best = measure(runner, decode_batch(runner, batch, args.context), 60)
            print(f"{dtype:9} decode  batch {batch:3} context {args.context:5}  {median:7.2f} ms  best {best:7.2f}")
        median, best = measure(runner, prefill_batch(runner, args.prefill), 15)
        print(f"{dtype:9} prefill tokens {args.prefill:5}              {median:7.2f} ms  best {best:7.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
