"""Reads mixtures of experts from config.json, in each family's spelling. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tandem.engine.config_fields import Fields

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
V2_DEFAULTS = {
    "first_k_dense_replace": 0, "moe_intermediate_size": 1407, "n_group": 1, "n_routed_experts": 64,
    "n_shared_experts": 2, "routed_scaling_factor": 1.0, "topk_group": 1, "topk_method": "greedy",
}  # fmt: skip
V3_DEFAULTS = {
    "first_k_dense_replace": 3, "moe_intermediate_size": 2048, "n_group": 8, "n_routed_experts": 256,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 8, "routed_scaling_factor": 2.5,
    "topk_group": 4, "topk_method": "noaux_tc",
}  # fmt: skip
"""transformers' defaults for absent fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """How checkpoints spell a layer's block of experts and the three matrices of each."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """The experts of a model; sizes are of the whole model.

    count           experts of a layer, of which each token uses `per_token`
    intermediate    features of one expert
    layers          those with experts; the others have a dense MLP
    routing         how a token's experts and their weights are chosen: a name among `ROUTERS` (models/routing.py)
    is_normed       the weights of a token's experts are divided by their sum
    groups          in which experts are chosen: those of `chosen_groups` of them alone
    scaling         factor of the weights
    shared          features of an MLP beside the experts that every token passes; 0 = there is none
    """

    count: int
    per_token: int
    intermediate: int
    layers: frozenset[int]
    routing: str = "softmax"
    is_normed: bool = True
    groups: int = 1
    chosen_groups: int = 1
    scaling: float = 1.0
    shared: int = 0
    names: ExpertNames = ExpertNames()


@dataclass(frozen=True, slots=True, kw_only=True)
class BiasedExpertsConfig(ExpertsConfig):
    """Experts with biases of products and router, in every layer. Their activation is

        (up + 1) · gate · sigmoid(alpha · gate), gate at most `limit`, up from -`limit` to `limit`

    `is_mxfp4`: the checkpoint has their matrices in numbers of 4 bits (`dequantize_mxfp4`).
    """

    alpha: float
    limit: float
    is_mxfp4: bool = False


def mixtral_experts(raw: Fields, layers: int) -> ExpertsConfig:
    """Experts in every layer."""
    return _checked(raw, ExpertsConfig(
        count=raw.positive("num_local_experts"),
        per_token=raw.positive("num_experts_per_tok"),
        intermediate=raw.positive("intermediate_size"),
        layers=frozenset(range(layers)),
        names=ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2"),
    ))  # fmt: skip


def qwen3_experts(raw: Fields, layers: int) -> ExpertsConfig:
    """Experts in each `decoder_sparse_step`-th layer, save those of `mlp_only_layers`."""
    step = raw.positive("decoder_sparse_step", default=1)
    dense = raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int and 0 <= layer < layers for layer in dense):
        raise raw.error(f"mlp_only_layers is {dense!r}", why=f"it must list layers from 0 to {layers - 1}")
    count = "num_experts" if raw.get("num_experts") is not None else "num_local_experts"  # transformers 5 saves this
    return _checked(raw, ExpertsConfig(
        count=raw.positive(count, default=128),
        per_token=raw.positive("num_experts_per_tok"),
        intermediate=raw.positive("moe_intermediate_size"),
        layers=frozenset(layer for layer in range(layers) if layer not in dense and (layer + 1) % step == 0),
        is_normed=raw.flag("norm_topk_prob", default=False),
    ))  # fmt: skip


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
    return _checked(raw, BiasedExpertsConfig(
        count=raw.positive("num_local_experts"),
        per_token=raw.positive("num_experts_per_tok"),
        intermediate=features,
        layers=frozenset(range(layers)),
        routing="chosen_softmax",
        alpha=raw.number("swiglu_alpha", default=1.702),
        limit=raw.number("swiglu_limit", default=7.0),
        is_mxfp4=is_mxfp4,
    ))  # fmt: skip


def deepseek_v2_experts(raw: Fields, layers: int) -> ExpertsConfig | None:
    """Probabilities of a softmax; the best of all, or of the groups that have the best ones. None: every layer is
    dense. Raises ModelError."""
    if _is_dense(raw, layers):
        return None
    _require(raw, "scoring_func", None, "softmax")
    _require(raw, "topk_method", "greedy", "group_limited_greedy")
    _require(raw, "norm_topk_prob", None, False)
    return _deepseek_experts(raw, layers, routing="softmax by groups", is_grouped=raw.get("topk_method") != "greedy")


def deepseek_v3_experts(raw: Fields, layers: int) -> ExpertsConfig | None:
    """Sigmoids, and a learned correction that counts in the choice alone. None as above. Raises ModelError."""
    if _is_dense(raw, layers):
        return None
    _require(raw, "scoring_func", None, "sigmoid")
    _require(raw, "topk_method", None, "noaux_tc")
    return _deepseek_experts(raw, layers, routing="sigmoid by groups", is_grouped=True)


def unused_layers(raw: Fields) -> int:
    """Number of layers behind the last one, which predict more than one token."""
    return max(_count(raw, "num_nextn_predict_layers"), _count(raw, "num_mtp_layers"))


def _checked(raw: Fields, experts: ExpertsConfig) -> ExpertsConfig:
    if experts.per_token > experts.count:
        raise raw.error(f"num_experts_per_tok is {experts.per_token}", why=f"a layer has {experts.count} experts")
    return experts


def _is_dense(raw: Fields, layers: int) -> bool:
    return _count(raw, "first_k_dense_replace") >= layers


def _deepseek_experts(raw: Fields, layers: int, *, routing: str, is_grouped: bool) -> ExpertsConfig:
    dense = _count(raw, "first_k_dense_replace")
    count, per_token = raw.positive("n_routed_experts"), raw.positive("num_experts_per_tok")
    groups = raw.positive("n_group", default=1) if is_grouped else 1
    chosen = raw.positive("topk_group", default=1) if is_grouped else 1
    if count % groups or chosen > groups:
        raise raw.error(f"{count} experts in {groups} groups, {chosen} of them chosen", why="they must divide evenly")
    if per_token > chosen * count // groups:
        has = f"{chosen} groups of {count // groups}"
        raise raw.error(f"num_experts_per_tok is {per_token}", why=f"a token chooses among {has} experts")
    features = raw.positive("moe_intermediate_size")
    return ExpertsConfig(
        count=count, per_token=per_token, intermediate=features, layers=frozenset(range(dense, layers)),
        routing=routing, is_normed=raw.flag("norm_topk_prob", default=False), groups=groups, chosen_groups=chosen,
        scaling=raw.number("routed_scaling_factor"), shared=features * _count(raw, "n_shared_experts"),
    )  # fmt: skip


def _require(raw: Fields, name: str, *allowed: object) -> None:
    if raw.get(name) not in allowed:
        raise raw.error(f"{name} {raw.get(name)} is not supported", why="this family is computed without it")


def _count(raw: Fields, name: str) -> int:
    return 0 if raw.get(name) in (None, 0) else raw.positive(name)
