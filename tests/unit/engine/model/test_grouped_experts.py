"""All experts as one operation against one after another: gates of both kinds, and biases of one rank alone."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tandem.engine.experts_config import BiasedExpertsConfig, ExpertsConfig
from tandem.engine.models.experts import ExpertParameters, Experts, grouped_experts, pack_experts
from tandem.engine.models.gpt_oss_experts import clamped_gate
from tandem.engine.models.mlp import ACTIVATE
from tandem.engine.models.routing import SoftmaxRouter
from tandem.engine.weights import Parameter

COUNT, FEATURES, HIDDEN = 6, 16, 24
SIZES: dict[str, Any] = {"count": COUNT, "per_token": 2, "intermediate": FEATURES, "layers": frozenset({0})}


def parameter(*shape: int, seed: int) -> Parameter:
    return Parameter(parts=(), tensor=torch.randn(shape, generator=torch.Generator().manual_seed(seed)))


def linear(weight: Tensor, bias: Tensor | None = None) -> Any:
    return partial(functional.linear, weight=weight, bias=bias)


def parameters(*, has_biases: bool) -> ExpertParameters:
    return ExpertParameters(
        router=parameter(COUNT, HIDDEN, seed=1),
        gate_up=parameter(COUNT * 2 * FEATURES, HIDDEN, seed=2),
        down=parameter(COUNT * HIDDEN, FEATURES, seed=3),
        gate_up_bias=parameter(COUNT * 2 * FEATURES, seed=4) if has_biases else None,
        down_bias=parameter(COUNT * HIDDEN, seed=5) if has_biases else None,
    )


def tensor(one: Parameter | None) -> Tensor | None:
    return None if one is None else one.tensor


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "clamped"])
@pytest.mark.parametrize("is_first_rank", [True, False])
def test_they_are_the_experts_one_by_one(activation: str, is_first_rank: bool) -> None:
    is_clamped = activation == "clamped"
    of, config = parameters(has_biases=is_clamped), ExpertsConfig(**SIZES)
    activate = ACTIVATE.get(activation)
    if is_clamped:
        config = BiasedExpertsConfig(**SIZES, alpha=1.7, limit=2.0)
        activate = clamped_gate(config, is_deterministic=False)
    assert activate is not None
    router = SoftmaxRouter(config, linear(of.router.tensor))
    gate_ups = pack_experts(of.gate_up.tensor, COUNT, linear, tensor(of.gate_up_bias))
    downs = pack_experts(of.down.tensor, COUNT, linear, tensor(of.down_bias) if is_first_rank else None)
    x = parameter(9, HIDDEN, seed=6).tensor
    expected = Experts(router, list(zip(gate_ups, downs, strict=True)), activate)(x)
    found = grouped_experts(router, of, config, "silu" if is_clamped else activation, has_down_bias=is_first_rank)(x)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)
