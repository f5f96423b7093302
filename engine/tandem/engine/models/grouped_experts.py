"""Experts as one operation over all of them, without asking the host for their rows: where there is a kernel."""

from __future__ import annotations

from torch import Tensor

from tandem.engine.experts_config import ExpertsConfig
from tandem.engine.gpt_oss_config import BiasedExpertsConfig
from tandem.engine.linear import Linear
from tandem.engine.models.experts import ExpertParameters
from tandem.engine.models.routing import Router
from tandem.kernels.expert_mlp import ExpertWeights, GateActivation, expert_mlp


def grouped_experts(
    router: Router, of: ExpertParameters, experts: ExpertsConfig, activation: str, *, has_down_bias: bool
) -> Linear:
    """x [T, hidden] to this rank's part of the answers, owned by the caller; the weights of `of` stay where they are.

    `activation` is the model's, for experts that have none of their own; with `has_down_bias` this rank adds the bias.
    """
    gate = GateActivation(kind=activation)
    if isinstance(experts, BiasedExpertsConfig):
        gate = GateActivation(kind="clamped", alpha=experts.alpha, limit=experts.limit)
    weights = ExpertWeights(
        count=experts.count, gate_up=of.gate_up.tensor, down=of.down.tensor, gate=gate,
        gate_up_bias=None if of.gate_up_bias is None else of.gate_up_bias.tensor,
        down_bias=of.down_bias.tensor if of.down_bias is not None and has_down_bias else None,
    )  # fmt: skip

    def answers(x: Tensor) -> Tensor:
        routing = router(x)
        return expert_mlp(x, routing.experts, routing.weights, weights)

    return answers
