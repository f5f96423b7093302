"""Speed of a whole decode step with random weights, against the time its bytes take at the device's copy bandwidth."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from bench.gpu.cases import Heads
from bench.gpu.machine import seconds
from bench.gpu.model import BLOCK_TOKENS, Decoder, Shape, Step
from bench.gpu.report import Case, Report

SHAPES = {
    "0.6b": Shape(hidden=1024, layers=28, heads=Heads(q=16, kv=8, width=128), ffn=3072, vocab=151936),
    "8b": Shape(hidden=4096, layers=32, heads=Heads(q=32, kv=8, width=128), ffn=14336, vocab=128256),
    "14b": Shape(hidden=5120, layers=40, heads=Heads(q=40, kv=8, width=128), ffn=17408, vocab=151936),
}
REHEARSAL = Shape(hidden=64, layers=2, heads=Heads(q=4, kv=2, width=16), ffn=128, vocab=100)
BATCHES = (1, 16, 64, 256)
CONTEXT, MOST_TOKENS = 2048, 128 << 10
"""Tokens of context of a sequence, and of all: 256 sequences have 512 each, so that 14B fits 80 GB."""
PREFILL_TOKENS = (2048, 8192)


def cases(device: torch.device, *, rehearsal: bool) -> Iterator[Case]:
    """One case a model, as its weights are drawn once."""
    for name, shape in {"tiny": REHEARSAL}.items() if rehearsal else SHAPES.items():
        yield f"model {name}", partial(_model, device=device, name=name, shape=shape, rehearsal=rehearsal)


@torch.inference_mode()
def _model(report: Report, device: torch.device, name: str, shape: Shape, rehearsal: bool) -> None:
    batches, most, prefills = ((2,), 48, (8,)) if rehearsal else (BATCHES, MOST_TOKENS, PREFILL_TOKENS)
    contexts = {batch: min(CONTEXT, most // batch) for batch in batches}
    blocks = {batch: -(-(context + 1) // BLOCK_TOKENS) for batch, context in contexts.items()}
    needed = max(*(batch * each for batch, each in blocks.items()), -(-max(prefills) // BLOCK_TOKENS))
    dtype = torch.float32 if rehearsal else torch.bfloat16
    model = Decoder(shape, num_blocks=needed, device=device, dtype=dtype)
    copied = report.value("machine", "copy bandwidth") * 1e9
    kv_bytes = 2 * shape.layers * shape.heads.kv * shape.heads.width * model.pool.element_size()
    for batch, context in contexts.items():
        step = _decode_step(model, batch, context, blocks[batch], device)
        floor = (model.weight_bytes() + batch * context * kv_bytes) / copied
        for graph in (True, False):
            taken = seconds(device, partial(model.forward, step, "triton"), graph=graph)
            case = f"model {name} batch {batch} context {context} {'graph' if graph else 'launched'}"
            report.add(case, "decode step", taken * 1e3, "ms")
            report.add(case, "decode speed", batch / taken, "tokens/s", batch / floor)
    for tokens in prefills:
        step = _prefill_step(model, tokens, device)
        taken = seconds(device, partial(model.forward, step, "triton"), repeat=5, graph=False)
        flops = model.weight_bytes() / model.pool.element_size() * 2 * tokens
        case = f"model {name} prefill {tokens} tokens"
        report.add(case, "prefill speed", tokens / taken, "tokens/s")
        report.add(
            case, "rate of the products", flops / taken / 1e12, "TFLOP/s", report.value("machine", "matmul rate")
        )


def _decode_step(model: Decoder, batch: int, context: int, per_sequence: int, device: torch.device) -> Step:
    blocks = torch.randperm(model.pool.shape[0])[: batch * per_sequence]
    table = blocks.view(batch, per_sequence).to(device, torch.int32)
    return Step(
        tokens=torch.randint(model.shape.vocab, (batch,), device=device),
        positions=torch.full((batch,), context - 1, device=device),
        slots=table[:, (context - 1) // BLOCK_TOKENS].long() * BLOCK_TOKENS + (context - 1) % BLOCK_TOKENS,
        block_table=table,
        context_lens=torch.full((batch,), context, dtype=torch.int32, device=device),
    )


def _prefill_step(model: Decoder, tokens: int, device: torch.device) -> Step:
    blocks = -(-tokens // BLOCK_TOKENS)
    table = torch.randperm(model.pool.shape[0])[:blocks].to(device, torch.int32)[None]
    positions = torch.arange(tokens, device=device)
    return Step(
        tokens=torch.randint(model.shape.vocab, (tokens,), device=device),
        positions=positions,
        slots=table[0, positions // BLOCK_TOKENS].long() * BLOCK_TOKENS + positions % BLOCK_TOKENS,
        block_table=table,
        context_lens=torch.tensor([tokens], dtype=torch.int32, device=device),
        cu_seqlens=torch.tensor([0, tokens], dtype=torch.int32, device=device),
    )
