"""Reads the experts of DeepSeek models from config.json. Imports no torch."""

from __future__ import annotations

from tandem.engine.config_fields import Fields
from tandem.engine.experts_config import ExpertsConfig

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


def deepseek_v2_experts(raw: Fields, layers: int) -> ExpertsConfig | None:
    """Probabilities of a softmax; the best of all, or of the groups that have the best ones. None: every layer is
    dense. Raises ModelError."""
    if _is_dense(raw, layers):
        return None
    _require(raw, "scoring_func", None, "softmax")
    _require(raw, "topk_method", "greedy", "group_limited_greedy")
    _require(raw, "norm_topk_prob", None, False)
    return _experts(raw, layers, routing="softmax by groups", is_grouped=raw.get("topk_method") != "greedy")


def deepseek_v3_experts(raw: Fields, layers: int) -> ExpertsConfig | None:
    """Sigmoids, and a learned correction that counts in the choice alone. None as above. Raises ModelError."""
    if _is_dense(raw, layers):
        return None
    _require(raw, "scoring_func", None, "sigmoid")
    _require(raw, "topk_method", None, "noaux_tc")
    return _experts(raw, layers, routing="sigmoid by groups", is_grouped=True)


def unused_layers(raw: Fields) -> int:
    """Number of layers behind the last one, which predict more than one token."""
    return max(_count(raw, "num_nextn_predict_layers"), _count(raw, "num_mtp_layers"))


def _is_dense(raw: Fields, layers: int) -> bool:
    return _count(raw, "first_k_dense_replace") >= layers


def _experts(raw: Fields, layers: int, *, routing: str, is_grouped: bool) -> ExpertsConfig:
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
