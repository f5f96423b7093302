"""Decode attention over latents: against its reference, then bytes of cached rows a second.

Shapes are those of DeepSeek's: rows of 512 + 64 numbers; 16 heads are V2-Lite or an eighth of V3, 128 heads are V3.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch

from bench.gpu.cases import Cache, Heads, random_cache
from bench.gpu.correctness import DECODE_LENS, TOLERANCES
from bench.gpu.machine import seconds
from bench.gpu.report import Case, Report
from tandem.kernels.latent_decode import latent_decode
from tandem.kernels.layer_view import key_value_view

RANK, WIDTH = 512, 576
HEADS = (16, 128)
BATCHES, CONTEXTS = (1, 16, 64), (1024, 4096, 16384)
_CACHE_BYTES = 512 << 20
"""Bytes walked through before anything is read again: several times the last-level cache of any device in use."""


def correctness(device: torch.device, *, rehearsal: bool) -> Iterator[Case]:
    for dtype in [torch.float32] if rehearsal else list(TOLERANCES):
        for heads in (4,) if rehearsal else (*HEADS, 20):
            name = f"latents {str(dtype).removeprefix('torch.')} {heads} heads"
            yield name, partial(_compare, name=name, device=device, dtype=dtype, heads=heads, rehearsal=rehearsal)


def speed(device: torch.device, *, rehearsal: bool) -> Iterator[Case]:
    for heads, batch, context in [(4, 2, 40)] if rehearsal else product(HEADS, BATCHES, CONTEXTS):
        name = f"decode latents {heads} heads batch {batch} context {context}"
        yield (
            name,
            partial(_speed, name=name, device=device, heads=heads, batch=batch, context=context, rehearsal=rehearsal),
        )


def _cache(lens: list[int], device: torch.device, dtype: torch.dtype, layers: int, *, rehearsal: bool) -> Cache:
    """A pool of one plane."""
    width = 48 if rehearsal else WIDTH
    heads = Heads(q=1, kv=1, width=width)
    return random_cache(lens, heads, device=device, dtype=dtype, layers=layers, planes=1)


def _compare(report: Report, name: str, device: torch.device, dtype: torch.dtype, heads: int, rehearsal: bool) -> None:
    lens = [17, 0, 40] if rehearsal else DECODE_LENS
    cache, rank = _cache(lens, device, dtype, 2, rehearsal=rehearsal), 32 if rehearsal else RANK
    q = torch.randn(len(lens), heads, cache.pool.shape[-1], device=device, dtype=dtype)
    found = {
        backend: latent_decode(
            q, key_value_view(cache.pool[:, 1]), cache.block_table, cache.context_lens, rank=rank,
            scale=q.shape[-1] ** -0.5, backend=backend,
        ).float()
        for backend in ("triton", "reference")
    }  # fmt: skip
    error = float((found["triton"] - found["reference"]).abs().max())
    report.add(name, "largest difference", error, "error", TOLERANCES[dtype])


def _speed(
    report: Report, name: str, device: torch.device, heads: int, batch: int, context: int, rehearsal: bool
) -> None:
    """Walks through the layers of a pool larger than the device's cache, in one CUDA graph, as a model does."""
    dtype = torch.float16 if rehearsal else torch.bfloat16
    layers = 2 if rehearsal else max(2, min(64, -(-_CACHE_BYTES // (2 * batch * context * WIDTH))))
    cache = _cache([context] * batch, device, dtype, layers, rehearsal=rehearsal)
    views, rank = [key_value_view(cache.pool[:, layer]) for layer in range(layers)], 32 if rehearsal else RANK
    q = torch.randn(batch, heads, cache.pool.shape[-1], device=device, dtype=dtype)

    def walk() -> None:
        for view in views:
            latent_decode(q, view, cache.block_table, cache.context_lens, rank=rank, scale=0.04, backend="triton")

    taken = seconds(device, walk) / layers
    report.add(name, "time", taken * 1e6, "us")
    report.add(name, "kv read", cache.bytes_read() / taken / 1e9, "GB/s", report.value("machine", "copy bandwidth"))
    flops = 2.0 * batch * context * heads * (cache.pool.shape[-1] + rank)
    report.add(name, "rate", flops / taken / 1e12, "TFLOP/s", report.value("machine", "matmul rate"))
