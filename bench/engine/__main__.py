"""Step times of the real engine by prefill tokens, batch, context and KV bytes moved: what calibrates the simulator.

The steps are a runner's, with greedy sampling and one thread; the model is the 135M shape with random weights. Each
figure's limit is the fitted coefficients' value, so that ratios are residuals. `--out` is a file for `--calibration`.
With `--speed` instead: decode and prefill of two shapes beside what the machine can do, and transformers.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.engine import quality, speed
from bench.engine.steps import blocks_needed, longest, measure, one_thread, shapes
from bench.kvtransfer import pools
from bench.kvtransfer.transports import pair
from bench.models import model_1b, model_135m
from bench.report import Row, arguments_of, machine, publish
from tandem.controlplane.simulator import calibration
from tandem.controlplane.simulator.calibration import Calibration
from tandem.controlplane.simulator.fit_measurements import DECODE, PREFILL, Moves
from tandem.core.config import SIM_KV_BYTES, WorkerSection
from tandem.core.cpu_level import hold_libraries
from tandem.engine.runner import ModelRunner
from tandem.worker.model_loading import LAYER_GROUPS

TOKENS, CONTEXTS, BATCHES = (16, 64, 128, 256, 512), (64, 512, 1536), (1, 2, 4, 8, 16)
MOVED_BLOCKS = (4, 16, 64, 128)
_MOVES = 8
_SCALES = {"_step_s": (1e3, "ms"), "_token_s": (1e6, "us"), "_sequence_s": (1e6, "us"), "_context_s": (1e9, "ns")}


def measured(
    model: Path, *, dtype: str = "auto", device: str = "cpu", tokens: Sequence[int] = TOKENS,
    contexts: Sequence[int] = CONTEXTS, batches: Sequence[int] = BATCHES, transport: str = "shm",
) -> dict[str, Any]:  # fmt: skip
    """Rows and worker settings of this model, as `tandem.controlplane.simulator.calibration.from_record` takes them."""
    one_thread()
    worker, every = WorkerSection(), list(shapes(tokens, contexts, batches))
    runner = ModelRunner(
        model_dir=model, dtype=dtype, device=device, block_tokens=worker.block_tokens,
        num_blocks=blocks_needed(every, worker.block_tokens), max_model_len=longest(every),
    )  # fmt: skip
    rows: dict[str, list[dict[str, Any]]] = {}
    for shape in every:
        rows.setdefault(shape.kind, []).append(shape.row(measure(runner, shape)))
    token_bytes = runner.layout.token_bytes()
    block_bytes = token_bytes * worker.block_tokens
    return {
        "name": f"{model.name}, {str(runner.dtype).removeprefix('torch.')}, {runner.device.type}: {machine()}",
        **rows,
        "kv_moves": moves(transport),
        "kv_token_bytes": token_bytes,
        "kv_tokens": (worker.kv_memory_bytes or SIM_KV_BYTES) // block_bytes * worker.block_tokens,
        "block_tokens": worker.block_tokens,
        "layer_groups": LAYER_GROUPS,
        "max_step_tokens": worker.max_step_tokens,
        "chunk_tokens": worker.chunk_tokens,
        "max_step_s": worker.max_step_s,
        "max_sequences": worker.max_sequences,
    }


def moves(transport: str) -> list[dict[str, Any]]:
    """Transfers between two processes, from opening to the notice that all is verified; the median of each length."""
    rows = []
    with pair(transport, spec="135m") as both:
        for blocks in MOVED_BLOCKS:
            size = blocks * pools.SMALL_135M.block_bytes()
            both.ours(size, 2)
            rows.append({"bytes": size, "s": statistics.median(both.ours(size, _MOVES).each_s)})
    return rows


def table(record: dict[str, Any]) -> list[Row]:
    """Every measured row beside the fit's value for it, and the fit."""
    fit, link = calibration.from_record(record), Moves.fitted(record["kv_moves"])
    rows = [_step(kind, row, fit) for kind in ("prefill_steps", "decode_steps", "mixed_steps") for row in record[kind]]
    for row in record["kv_moves"]:
        said_s = link.takes_s(row["bytes"])
        rows.append(Row("move", f"{row['bytes'] / (1 << 20):.1f} MiB", 1e3 * row["s"], "ms", 1e3 * said_s))
    worst = max(abs(1 - 1 / row.ratio) for row in rows if row.ratio)
    for name in (*PREFILL, *DECODE, "shared_step_s"):
        scale, unit = next(known for ending, known in _SCALES.items() if name.endswith(ending))
        rows.append(Row("fit", name, scale * getattr(fit, name), unit))
    rows.append(Row("fit", "a move besides its bytes", 1e3 * link.move_s, "ms"))
    rows.append(Row("fit", "link_bytes_per_s", link.bytes_per_s / 1e6, "MB/s"))
    return [*rows, Row("fit", "worst residual", 100 * worst, "%")]


def _step(kind: str, row: dict[str, Any], fit: Calibration) -> Row:
    tokens, context, batch = row.get("tokens", 0), row.get("context", 0), row.get("batch", 0)
    each = row.get("batch_context", context)
    said_s = fit.step_s([(context, context + tokens)] if tokens else [], batch, batch * each)
    words = [f"{tokens} tokens behind {context}"] if tokens else []
    words += [f"{batch} sequences of {each}"] if batch else []
    return Row(kind.removesuffix("_steps"), " and ".join(words), 1e3 * row["s"], "ms", 1e3 * said_s)


def _speed(args: argparse.Namespace) -> int:
    """Both shapes, or the model that was named, with as many threads as torch takes."""
    models = [model_135m(), model_1b()] if args.model is None else [args.model]
    batches = speed.BATCHES if args.batches is BATCHES else args.batches
    rows: list[Row] = []
    panels: list[tuple[str, dict[str, float]]] = []
    for model in models:
        found = speed.measured(model, rounds=args.rounds, batches=batches, prompts=args.prompts)
        whats = f"decode, batch {batches[0]}", f"prefill of {args.prompts[0]}"
        panels += [(f"{found[0].case}, {what}", speed.speeds(found, what)) for what in whats]
        rows += found
    answers = quality.measured(args.windows)
    rows += answers
    if args.picture is not None:
        quality.picture(answers, panels, args.picture)
    publish("engine-speed", rows, args.out, threads=torch.get_num_threads())
    return 0


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = arguments_of("engine", __doc__)
    parser.add_argument("--model", type=Path, default=None, help="without it, the 135M shape with random weights")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS, help="of a chunk")
    parser.add_argument("--contexts", nargs="+", type=int, default=CONTEXTS, help="tokens before a chunk, of a decode")
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES, help="sequences of a decode step")
    parser.add_argument("--transport", default="shm", help="by which KV is moved")
    parser.add_argument("--speed", action="store_true", help="beside read bandwidth, GEMM peak and transformers")
    parser.add_argument("--rounds", type=int, default=7, help="with --speed: of everything in turn")
    parser.add_argument("--picture", type=Path, default=None, help="with --speed: perplexity over speed, .svg or .png")
    parser.add_argument("--windows", type=int, default=0, help="with --speed: of held-out text, 0 = all")
    parser.add_argument("--prompts", nargs="+", type=int, default=speed.PROMPTS, help="with --speed: tokens")
    args = parser.parse_args(argv)
    hold_libraries()
    if args.speed:
        return _speed(args)
    model = model_135m() if args.model is None else args.model
    record = measured(
        model, dtype=args.dtype, device=args.device, tokens=args.tokens, contexts=args.contexts, batches=args.batches,
        transport=args.transport,
    )  # fmt: skip
    publish("engine", table(record), args.out, calibration=record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
