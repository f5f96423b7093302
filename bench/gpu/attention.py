"""Speed of the kernels alone: bytes of keys and values a second, against the device's own copy; rates of prefill.

Decode cases walk through the layers of a pool larger than the cache of the device, in one CUDA graph, as a model does.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch
from torch.nn import functional

from bench.gpu.cases import Heads, random_cache, starts_of
from bench.gpu.machine import seconds
from bench.gpu.report import Case, Report
from tandem.kernels.extend_attention import extend_attention
from tandem.kernels.kv_blocks import gather_blocks, scatter_blocks
from tandem.kernels.paged_decode import paged_decode

SHAPES = {
    "32/32x128": Heads(q=32, kv=32, width=128), "32/8x128": Heads(q=32, kv=8, width=128),
    "64/8x128": Heads(q=64, kv=8, width=128),
}  # fmt: skip
"""Query heads that share a KV head: 1, 4 and 8."""
BATCHES = (1, 8, 16, 32, 64, 128)
CONTEXTS = (1024, 4096, 16384, 65536)
EXTEND = [(512, 512), (2048, 2048), (8192, 8192), (512, 8192), (2048, 32768)]
_CACHE_BYTES = 512 << 20
"""Bytes walked through before anything is read again: several times the last-level cache of any device in use."""
_MOST_LAYER_BYTES = 12 << 30
"""Limit of one layer: two of them and a copy's buffers fit into 80 GB. Larger cases are left out."""


def cases(device: torch.device, *, rehearsal: bool) -> Iterator[Case]:
    for shape, heads in list(SHAPES.items())[1:2] if rehearsal else SHAPES.items():
        for batch, context in [(2, 40)] if rehearsal else product(BATCHES, CONTEXTS):
            if _layer_bytes(heads, batch, context) > _MOST_LAYER_BYTES:
                continue
            for block_tokens in (16,) if rehearsal or (batch, context) != (64, 4096) else (16, 32, 64):
                name = f"decode {shape} batch {batch} context {context} block {block_tokens}"
                yield name, partial(
                    _decode, name=name, device=device, heads=heads, batch=batch, context=context,
                    block_tokens=block_tokens, rehearsal=rehearsal,
                )  # fmt: skip
        for count, context in [(8, 24)] if rehearsal else EXTEND:
            name = f"extend {shape} tokens {count} context {context}"
            yield name, partial(_extend, name=name, device=device, heads=heads, count=count, context=context)
    yield "kv_blocks", partial(_blocks, device=device, rehearsal=rehearsal)


def _layer_bytes(heads: Heads, batch: int, context: int) -> int:
    """Keys and values of one layer, in numbers of two bytes."""
    return 4 * batch * context * heads.kv * heads.width


def _decode(
    report: Report, name: str, device: torch.device, heads: Heads, batch: int, context: int, block_tokens: int,
    rehearsal: bool,
) -> None:  # fmt: skip
    one_layer = _layer_bytes(heads, batch, context)
    layers = 2 if rehearsal else max(2, min(64, -(-_CACHE_BYTES // one_layer)))
    dtype = torch.float16 if rehearsal else torch.bfloat16
    cache = random_cache([context] * batch, heads, device=device, dtype=dtype, block_tokens=block_tokens, layers=layers)
    q = torch.randn(batch, heads.q, heads.width, device=device, dtype=dtype)

    def walk() -> None:
        for layer in range(layers):
            paged_decode(q, cache.pool[:, layer], cache.block_table, cache.context_lens, scale=0.1, backend="triton")

    taken = seconds(device, walk) / layers
    report.add(name, "time", taken * 1e6, "us")
    copied = report.value("machine", "copy bandwidth")
    report.add(name, "kv read", cache.bytes_read() / taken / 1e9, "GB/s", copied)


def _extend(report: Report, name: str, device: torch.device, heads: Heads, count: int, context: int) -> None:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    cache = random_cache([context], heads, device=device, dtype=dtype)
    q = torch.randn(count, heads.q, heads.width, device=device, dtype=dtype)
    starts = starts_of([count], device)
    flops = 4.0 * heads.q * heads.width * (count * context - count * (count - 1) / 2)
    peak = report.value("machine", "matmul rate")
    taken = seconds(
        device,
        lambda: extend_attention(
            q, cache.pool[:, 0], starts, cache.block_table, cache.context_lens, scale=0.1, backend="triton"
        ),
    )
    report.add(name, "rate", flops / taken / 1e12, "TFLOP/s", peak)
    if count == context:
        k, v = torch.randn(2, 1, heads.kv, context, heads.width, device=device, dtype=dtype)
        dense = q.transpose(0, 1)[None]
        taken = seconds(
            device,
            lambda: functional.scaled_dot_product_attention(dense, k, v, is_causal=True, enable_gqa=True, scale=0.1),
        )
        report.add(name, "rate of torch, unpaged", flops / taken / 1e12, "TFLOP/s", peak)


def _blocks(report: Report, device: torch.device, rehearsal: bool) -> None:
    """A transfer's gather and scatter: whole blocks, and one layer group of half the heads."""
    blocks, layers = (4, 2) if rehearsal else (512, 32)
    pool = torch.zeros((2 * blocks, layers, 2, 8, 16, 128), dtype=torch.float16, device=device)
    ids = torch.randperm(2 * blocks)[:blocks].to(device, torch.int32)
    copied = report.value("machine", "copy bandwidth")
    for name, part in (("whole", (slice(None), slice(None))), ("4 layers, half the heads", (slice(0, 4), slice(4, 8)))):
        staging = gather_blocks(pool, ids, *part, backend="triton")
        moved = 2 * staging.numel() * staging.element_size() / 1e9
        taken = seconds(device, partial(gather_blocks, pool, ids, *part, backend="triton"))
        report.add(f"kv_blocks {name}", "gather", moved / taken, "GB/s", copied)
        taken = seconds(device, partial(scatter_blocks, pool, ids, staging, *part, backend="triton"))
        report.add(f"kv_blocks {name}", "scatter", moved / taken, "GB/s", copied)
