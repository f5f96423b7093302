"""Reads gpt-oss's experts from config.json: with biases, and a gate that is clamped. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tandem.engine.config_fields import Fields
from tandem.engine.experts_config import ExpertsConfig, checked

MXFP4 = "mxfp4"
MXFP4_GROUP = 32
"""Numbers that share a scale."""
_QUANTIZATION_FIELDS = {"quant_method", "modules_to_not_convert", "dequantize"}
"""Of `quantization_config`. Which tensors are packed is seen in the checkpoint; they are read into plain numbers."""

GPT_OSS_DEFAULTS: dict[str, Any] = {
    "attention_bias": True, "head_dim": 64, "rms_norm_eps": 1e-5, "sliding_window": 128, "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "num_local_experts": 128, "num_experts_per_tok": 4,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class BiasedExpertsConfig(ExpertsConfig):
    """Experts with biases of products and router, in every layer. Their activation is

        (up + 1) · gate · sigmoid(alpha · gate), gate at most `limit`, up from -`limit` to `limit`

    `is_mxfp4`: the checkpoint has their matrices in numbers of 4 bits (`mxfp4.py`).
    """

    alpha: float
    limit: float
    is_mxfp4: bool = False


def gpt_oss_experts(raw: Fields, layers: int) -> ExpertsConfig:
    """Raises ModelError with the field that is wrong or not supported."""
    quantization = raw.get("quantization_config") or {}
    features, is_mxfp4 = raw.positive("intermediate_size"), quantization.get("quant_method") == MXFP4
    if quantization and not is_mxfp4:
        raise raw.error(
            f"quantized weights ({quantization.get('quant_method')}) are not supported",
            why=f"experts with biases are read plain or as {MXFP4}", todo="use one of these",
        )  # fmt: skip
    for name in ("hidden_size", "intermediate_size") if is_mxfp4 else ():
        if raw.positive(name) % MXFP4_GROUP:
            raise raw.error(f"{name} is {raw.get(name)}", why=f"mxfp4 weights need a multiple of {MXFP4_GROUP}")
    for unknown in sorted(set(quantization) - _QUANTIZATION_FIELDS):
        raise raw.error(f"quantization_config.{unknown} is not supported", why="mxfp4 weights are read without it")
    return checked(raw, BiasedExpertsConfig(
        count=raw.positive("num_local_experts"),
        per_token=raw.positive("num_experts_per_tok"),
        intermediate=features,
        layers=frozenset(range(layers)),
        routing="chosen_softmax",
        alpha=raw.number("swiglu_alpha", default=1.702),
        limit=raw.number("swiglu_limit", default=7.0),
        is_mxfp4=is_mxfp4,
    ))  # fmt: skip
