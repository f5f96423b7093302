"""Reads mixtures of experts from config.json, in each family's spelling. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.engine.config_fields import Fields


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
    routing         how a token's experts and their weights are chosen: a name among `ROUTERS` (models/experts.py)
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


def mixtral_experts(raw: Fields, layers: int) -> ExpertsConfig:
    """Experts in every layer."""
    return checked(raw, ExpertsConfig(
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
    return checked(raw, ExpertsConfig(
        count=raw.positive(count, default=128),
        per_token=raw.positive("num_experts_per_tok"),
        intermediate=raw.positive("moe_intermediate_size"),
        layers=frozenset(layer for layer in range(layers) if layer not in dense and (layer + 1) % step == 0),
        is_normed=raw.flag("norm_topk_prob", default=False),
    ))  # fmt: skip


def checked(raw: Fields, experts: ExpertsConfig) -> ExpertsConfig:
    if experts.per_token > experts.count:
        raise raw.error(f"num_experts_per_tok is {experts.per_token}", why=f"a layer has {experts.count} experts")
    return experts
