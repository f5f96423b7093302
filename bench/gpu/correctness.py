"""Every kernel against its reference on the device, then a whole small model, paged against dense.

Errors are the largest absolute difference for queries, keys and values of unit variance. The reference computes in
fp32 there, so a tolerance is about the rounding of the kernel's own dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.gpu.cases import Heads, random_cache, starts_of
from bench.gpu.model import BLOCK_TOKENS, Decoder, Shape, Step
from bench.gpu.report import Case, Report
from tandem.kernels.extend_attention import extend_attention
from tandem.kernels.kv_blocks import copy_blocks, gather_blocks, scatter_blocks
from tandem.kernels.kv_store import kv_store
from tandem.kernels.paged_decode import paged_decode

TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
OTHER_CHOICES = {torch.float32: 0.0, torch.float16: 0.05, torch.bfloat16: 0.25}
"""Share of tokens that may have another largest logit: random weights leave the first two within rounding that
often."""
HEADS = [Heads(q=8, kv=8, width=64), Heads(q=32, kv=8, width=128), Heads(q=14, kv=2, width=64)]
HEADS += [Heads(q=8, kv=4, width=256), Heads(q=6, kv=2, width=80)]
OPTIONS: list[dict[str, Any]] = [{}, {"window": 100}, {"softcap": 20.0}, {"window": 33, "softcap": 5.0}]
DECODE_LENS = [1, 15, 16, 17, 0, 63, 64, 65, 255, 256, 257, 1000, 4097]
EXTEND = [(1, 1), (5, 5), (64, 64), (65, 65), (129, 129), (200, 7), (1000, 300), (333, 1), (40, 0)]
"""(context, query tokens) of each sequence."""


def cases(device: torch.device, *, rehearsal: bool) -> Iterator[Case]:
    """Names and bodies of cases; a rehearsal keeps the shapes that an interpreter can run."""
    for dtype in [torch.float32] if rehearsal else list(TOLERANCES):
        name = str(dtype).removeprefix("torch.")
        for heads in HEADS[2:3] if rehearsal else HEADS:
            suffix = f"{name} {heads.q}/{heads.kv}x{heads.width}"
            lens = [17, 0, 70] if rehearsal else DECODE_LENS
            chunks = [(40, 9), (20, 20)] if rehearsal else EXTEND
            yield f"decode {suffix}", partial(_decode, device=device, heads=heads, dtype=dtype, lens=lens)
            yield f"extend {suffix}", partial(_extend, device=device, heads=heads, dtype=dtype, chunks=chunks)
        yield f"memory {name}", partial(_memory, device=device, dtype=dtype)
        yield f"model {name}", partial(_model, device=device, dtype=dtype, rehearsal=rehearsal)
    if not rehearsal:
        yield "far blocks bfloat16", partial(_far_blocks, device=device)


def _error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.float() - expected.float()).abs().max()) if actual.numel() else 0.0


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _decode(report: Report, device: torch.device, heads: Heads, dtype: torch.dtype, lens: list[int]) -> None:
    for block_tokens in (16, 64):
        cache = random_cache(lens, heads, device=device, dtype=dtype, layers=2, block_tokens=block_tokens)
        q = torch.randn(len(lens), heads.q, heads.width, device=device, dtype=dtype)
        for options in OPTIONS:
            arguments = (q, cache.pool[:, 1], cache.block_table, cache.context_lens)
            options = options | {"scale": heads.width**-0.5}
            expected = paged_decode(*arguments, **options, backend="reference")
            error = _error(paged_decode(*arguments, **options, backend="triton"), expected)
            case = f"decode {_name(dtype)} {heads.q}/{heads.kv}x{heads.width} block {block_tokens} {_said(options)}"
            report.add(case, "largest difference", error, "error", TOLERANCES[dtype])


def _extend(
    report: Report, device: torch.device, heads: Heads, dtype: torch.dtype, chunks: list[tuple[int, int]]
) -> None:
    lens, counts = [context for context, _ in chunks], [count for _, count in chunks]
    cache = random_cache(lens, heads, device=device, dtype=dtype, layers=2)
    q = torch.randn(sum(counts), heads.q, heads.width, device=device, dtype=dtype)
    for options in OPTIONS:
        arguments = (q, cache.pool[:, 1], starts_of(counts, device), cache.block_table, cache.context_lens)
        options = options | {"scale": heads.width**-0.5}
        expected = extend_attention(*arguments, **options, backend="reference")
        error = _error(extend_attention(*arguments, **options, backend="triton"), expected)
        case = f"extend {_name(dtype)} {heads.q}/{heads.kv}x{heads.width} {_said(options)}"
        report.add(case, "largest difference", error, "error", TOLERANCES[dtype])


def _said(options: dict[str, Any]) -> str:
    return " ".join(f"{key} {value}" for key, value in options.items() if key != "scale") or "plain"


def _memory(report: Report, device: torch.device, dtype: torch.dtype) -> None:
    """kv_store, gather, scatter and copy: bits, so any difference at all is an error."""
    heads = Heads(q=8, kv=4, width=80)
    cache = random_cache([100, 333], heads, device=device, dtype=dtype, layers=3)
    k, v = torch.randn(2, 50, heads.kv, heads.width, device=device, dtype=dtype)
    slots = torch.randperm(cache.pool.shape[0] * 16)[:50].to(device)
    slots[::7] = -1
    ids = torch.randperm(cache.pool.shape[0])[:12].to(device, torch.int32)
    layers, part = slice(1, 3), slice(1, 4)

    def run(backend: str) -> list[Tensor]:
        stored, copied, target = cache.pool.clone(), cache.pool.clone(), torch.zeros_like(cache.pool)
        kv_store(k, v, stored[:, 1], slots, backend=backend)
        staging = gather_blocks(cache.pool, ids, layers, part, backend=backend)
        scatter_blocks(target, ids, staging, layers, part, backend=backend)
        copy_blocks(copied, ids[:6], ids[6:], backend=backend)
        return [stored, staging, target, copied]

    names = ("kv_store", "gather_blocks", "scatter_blocks", "copy_blocks")
    for name, actual, expected in zip(names, run("triton"), run("reference"), strict=True):
        wrong = int((actual != expected).sum())
        report.add(f"{name} {_name(dtype)}", "numbers that differ", wrong, "error", 0)


def _far_blocks(report: Report, device: torch.device) -> None:
    """A pool past 2^31 numbers: 32-bit offsets would wrap."""
    heads = Heads(q=16, kv=8, width=128)
    blocks = 2**31 // (4 * 2 * heads.kv * 16 * heads.width) + 64
    cache = random_cache([700, 90], heads, device=device, dtype=torch.bfloat16, layers=4, spare_blocks=blocks)
    needed = cache.block_table.shape[1]
    far = cache.block_table.clone()
    far[0, :] = torch.arange(cache.pool.shape[0] - needed, cache.pool.shape[0], device=device)
    q = torch.randn(2, heads.q, heads.width, device=device, dtype=torch.bfloat16)
    options = {"scale": heads.width**-0.5}
    arguments = (q, cache.pool[:, 3], far, cache.context_lens)
    expected = paged_decode(*arguments, **options, backend="reference")
    error = _error(paged_decode(*arguments, **options, backend="triton"), expected)
    report.add("far blocks decode", "largest difference", error, "error", TOLERANCES[torch.bfloat16])
    ids = far[0, -4:].contiguous()
    staging = gather_blocks(cache.pool, ids, backend="triton")
    wrong = int((staging != cache.pool[ids.long()]).sum())
    report.add("far blocks gather", "numbers that differ", wrong, "error", 0)


def _model(report: Report, device: torch.device, dtype: torch.dtype, rehearsal: bool) -> None:
    """Chunked prefill of three prompts, then greedy decode, on kernels and on references side by side.

    Both read the tokens that the reference chose, so that one close call does not hide everything after it.
    """
    width = 16 if rehearsal else 64
    shape = Shape(hidden=8 * width, layers=2, heads=Heads(q=4, kv=2, width=width), ffn=16 * width, vocab=512)
    model = Decoder(shape, num_blocks=64, device=device, dtype=dtype)
    lens = [9, 3, 20] if rehearsal else [150, 3, 64]
    steps = 2 if rehearsal else 24
    table = torch.randperm(64)[:60].view(3, 20).to(device, torch.int32)
    prompts = [torch.randint(shape.vocab, (length,)) for length in lens]
    pools = {name: model.pool.clone() for name in ("triton", "reference")}
    worst, agreed, judged = 0.0, 0, 0

    def both(step: Step) -> Tensor:
        nonlocal worst, agreed, judged
        logits = {}
        for name, pool in pools.items():
            model.pool = pool
            logits[name] = model.forward(step, name).float()
        worst = max(worst, _error(logits["triton"], logits["reference"]))
        agreed += int((logits["triton"].argmax(-1) == logits["reference"].argmax(-1)).sum())
        judged += logits["triton"].shape[0]
        return logits["reference"]

    halves = [length // 2 for length in lens]
    both(_chunk(prompts, [0] * 3, halves, table, device))
    logits = both(_chunk(prompts, halves, lens, table, device))
    ends = starts_of([length - half for length, half in zip(lens, halves, strict=True)], device).long()
    chosen = logits[ends[1:] - 1].argmax(-1)
    for index in range(steps):
        positions = torch.tensor([length + index for length in lens], device=device)
        step = Step(
            tokens=chosen, positions=positions, slots=_slots(table, range(3), positions),
            block_table=table, context_lens=(positions + 1).int(),
        )  # fmt: skip
        chosen = both(step).argmax(-1)
    report.add(f"model {_name(dtype)}", "largest difference of logits", worst, "error", 10 * TOLERANCES[dtype])
    report.add(f"model {_name(dtype)}", "share of other choices", 1 - agreed / judged, "error", OTHER_CHOICES[dtype])


def _chunk(prompts: list[Tensor], begins: list[int], ends: list[int], table: Tensor, device: torch.device) -> Step:
    spans = [torch.arange(begin, end, device=device) for begin, end in zip(begins, ends, strict=True)]
    rows = [row for row, span in enumerate(spans) for _ in range(len(span))]
    positions = torch.cat(spans)
    tokens = [prompt[begin:end] for prompt, begin, end in zip(prompts, begins, ends, strict=True)]
    return Step(
        tokens=torch.cat(tokens).to(device),
        positions=positions,
        slots=_slots(table, rows, positions),
        block_table=table,
        context_lens=torch.tensor(ends, dtype=torch.int32, device=device),
        cu_seqlens=starts_of([len(span) for span in spans], device),
    )


def _slots(table: Tensor, rows: Any, positions: Tensor) -> Tensor:
    row = torch.tensor(list(rows), device=table.device)
    return table[row, positions // BLOCK_TOKENS].long() * BLOCK_TOKENS + positions % BLOCK_TOKENS
