"""Rates by arithmetic, for machines without a measurement: bandwidth and computing speed of an accelerator, for a
model.

    prompt token    2 · parameters / computing speed
    decode step     weights / memory speed, and the KV of its context besides

A measured calibration is more exact; see docs/planning.md for what these figures leave out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tandem.controlplane.planner.records import Rates
from tandem.core.prefill_queue import PrefillSpeed

TP_COST = 0.06
"""Share of the joint speed that every doubling of the ranks costs."""
SEQUENCE_S = 30e-6
_MEMORY_SHARE = 0.9
"""Of an accelerator's memory, for weights and KV."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One accelerator, by its attained speed and not by its data sheet's peak. `price`: an hour of it, in any unit.
    `link_bytes_per_s`: between two workers, for each accelerator of a worker."""

    name: str
    flops_per_s: float
    memory_bytes_per_s: float
    memory_bytes: float
    link_bytes_per_s: float
    price: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """`parameters` that a token passes through; `context_flops` of a token for each one before it."""

    name: str
    parameters: float
    weight_bytes: float
    kv_token_bytes: int
    context_flops: float


HARDWARE: Mapping[str, Hardware] = {
    one.name: one
    for one in (
        Hardware(name="h100", flops_per_s=400e12, memory_bytes_per_s=2.5e12, memory_bytes=80e9, link_bytes_per_s=20e9),
        Hardware(name="a100", flops_per_s=170e12, memory_bytes_per_s=1.5e12, memory_bytes=80e9, link_bytes_per_s=10e9),
        Hardware(name="l40s", flops_per_s=150e12, memory_bytes_per_s=0.65e12, memory_bytes=48e9, link_bytes_per_s=5e9),
        Hardware(name="l4", flops_per_s=50e12, memory_bytes_per_s=0.23e12, memory_bytes=24e9, link_bytes_per_s=2e9),
    )
}
MODELS: Mapping[str, ModelShape] = {
    one.name: one
    for one in (
        ModelShape(
            name="llama-3-8b", parameters=8.0e9, weight_bytes=16.1e9, kv_token_bytes=131_072, context_flops=0.524e6
        ),
        ModelShape(
            name="llama-3-70b", parameters=70.6e9, weight_bytes=141e9, kv_token_bytes=327_680, context_flops=2.62e6
        ),
        ModelShape(
            name="qwen3-32b", parameters=32.8e9, weight_bytes=65.5e9, kv_token_bytes=262_144, context_flops=2.1e6
        ),
    )
}


def rates(hardware: Hardware, model: ModelShape, tp: int) -> Rates | None:
    """Return the rates of a worker of `tp` such accelerators; None if the model does not fit with room for any KV."""
    ranks = tp / (1 + TP_COST * math.log2(tp))
    kv_bytes = _MEMORY_SHARE * hardware.memory_bytes * tp - model.weight_bytes
    kv_tokens = int(kv_bytes / model.kv_token_bytes)
    if kv_tokens < 2048:
        return None
    return Rates(
        prefill=PrefillSpeed(
            tokens_per_s=hardware.flops_per_s * ranks / (2 * model.parameters),
            context_s=model.context_flops / (0.875 * hardware.flops_per_s * ranks),
        ),
        prefill_step_s=0.004,
        decode_step_s=model.weight_bytes / (hardware.memory_bytes_per_s * ranks),
        decode_sequence_s=SEQUENCE_S,
        decode_context_s=model.kv_token_bytes / (hardware.memory_bytes_per_s * ranks),
        kv_tokens=kv_tokens,
        kv_token_bytes=model.kv_token_bytes,
        link_bytes_per_s=hardware.link_bytes_per_s * tp,
    )
