"""A feed-forward of experts: a router chooses a few of many small MLPs per token and adds up their answers.

Over several ranks every expert's intermediate features are split, as a dense MLP's are: each rank has a slice of all
experts, works as long as the others whatever the router chooses, and the ranks' answers add up. Routers are whole on
every rank and choose alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.engine.experts_config import BiasedExpertsConfig, ExpertsConfig
from tandem.engine.linear import Linear
from tandem.engine.models.mlp import MakeParameter, MlpParameters, mlp_parameters
from tandem.engine.models.routing import Router, Routing
from tandem.engine.weights import ExpertEntry, Parameter, TensorPart, TensorSplit
from tandem.kernels.expert_mlp import ExpertWeights, GateActivation, expert_mlp

_IN_FP32 = ("softmax by groups", "sigmoid by groups")
"""Routings that compute scores in fp32, whatever the model's dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertParameters:
    """The tensors of one layer's experts, which are stacked along dim 0.

    gate_up     [count · 2 · features, hidden]: gate and up of the first expert, gate and up of the next, …
    down        [count · hidden, features]
    …_bias      [count · rows] in the same order, where the family has them
    correction  [count], fp32, of routers that have one
    shared      the MLP that every token passes
    """

    router: Parameter
    gate_up: Parameter
    down: Parameter
    router_bias: Parameter | None = None
    gate_up_bias: Parameter | None = None
    down_bias: Parameter | None = None
    correction: Parameter | None = None
    shared: MlpParameters | None = None

    def members(self) -> list[Parameter]:
        some = (self.router_bias, self.gate_up_bias, self.down_bias, self.correction)
        found = [self.router, self.gate_up, self.down, *(one for one in some if one is not None)]
        return found if self.shared is None else found + self.shared.members()


def expert_parameters(experts: ExpertsConfig, layer: str, hidden: int, make: MakeParameter) -> ExpertParameters:
    """The experts of `layer` ("model.layers.0"), as checkpoints have them, each on its own, or as transformers has
    them in memory: those of a layer in one tensor, gate on top of up."""
    names, features = experts.names, experts.intermediate
    block, each = f"{layer}.{names.block}", [f"{layer}.{names.block}.experts.{n}" for n in range(experts.count)]
    pairs = [(f"{one}.{name}", features) for one in each for name in (names.gate, names.up)]
    router = make((f"{block}.gate", experts.count), columns=hidden)
    gate_up = make(*pairs, columns=hidden, split=TensorSplit.ROWS)
    down = make(*((f"{one}.{names.down}", hidden) for one in each), columns=features, split=TensorSplit.COLUMNS)
    router.other_parts = (TensorPart(key=f"{layer}.mlp.gate.weight", rows=experts.count),)
    gate_up.other_parts = _entries(f"{layer}.mlp.experts.gate_up_proj", experts.count, features, 2)
    down.other_parts = _entries(f"{layer}.mlp.experts.down_proj", experts.count, hidden, 1)
    correction = shared = None
    if experts.routing in _IN_FP32:
        router.tensor = router.tensor.float()
    if experts.routing == "sigmoid by groups":
        correction = make((f"{block}.gate", experts.count), kind="e_score_correction_bias")
        correction.tensor = correction.tensor.float()
    if experts.shared:
        shared = mlp_parameters(f"{block}.shared_experts", make, hidden=hidden, intermediate=experts.shared)
    return ExpertParameters(router=router, gate_up=gate_up, down=down, correction=correction, shared=shared)


def _entries(key: str, count: int, rows: int, pieces: int) -> tuple[TensorPart, ...]:
    """Parts of one tensor [count, pieces · rows, columns], in its order."""
    return tuple(
        TensorPart(
            key=key,
            rows=rows,
            entry=ExpertEntry(index=index, of=count, first_row=piece * rows, stored_rows=pieces * rows),
        )
        for index in range(count)
        for piece in range(pieces)
    )


class Experts:
    """Ready to run: of each expert the product that makes gate and up, and the one behind the activation.

    A call takes x [T, hidden] and returns this rank's part of the answers, [T, hidden], owned by the caller.
    """

    __slots__ = ("_activate", "_products", "_router")

    def __init__(
        self, router: Router, products: Sequence[tuple[Linear, Linear]], activate: Callable[[Tensor], Tensor]
    ) -> None:
        self._router, self._products, self._activate = router, products, activate

    def __call__(self, x: Tensor) -> Tensor:
        routing = self._router(x)
        chosen = routing.experts.flatten()
        order = chosen.argsort(stable=True)  # pairs of token and expert, those of an expert side by side
        rows = x.index_select(0, order // routing.experts.shape[1])
        counts, end = chosen.bincount(minlength=len(self._products)).tolist(), 0
        for (gate_up, down), count in zip(self._products, counts, strict=True):
            if count:
                mine, end = rows[end : end + count], end + count
                mine.copy_(down(self._activate(gate_up(mine))))
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
        return _weighted_sum(rows, place.view_as(routing.experts), routing).to(x.dtype)


def _weighted_sum(answers: Tensor, place: Tensor, routing: Routing) -> Tensor:
    """Of each token's answers, which lie at `place` [T, per_token], by its weights: fp32 [T, hidden].

    Products and sums are operations of their own and follow the router's order: a token's bits are the same whatever
    tokens stand beside it.
    """
    total: Tensor | None = None
    for where, weight in zip(place.unbind(1), routing.weights.unbind(1), strict=True):
        part = answers.index_select(0, where) * weight[:, None]
        total = part if total is None else total.add_(part)
    assert total is not None
    return total


def grouped_experts(
    router: Router, of: ExpertParameters, experts: ExpertsConfig, activation: str, *, has_down_bias: bool
) -> Linear:
    """The same as one operation over all experts, where there is a kernel: their rows are not asked of the host.

    x [T, hidden] to this rank's part of the answers, owned by the caller; the weights of `of` stay where they are.
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


def pack_experts(weight: Tensor, count: int, make: Callable[..., Linear], bias: Tensor | None = None) -> list[Linear]:
    """A product for each of `count` experts that are stacked along dim 0 of `weight`, and of `bias` where there is one.

    Where `make` packs, the packed ones lie beside `weight` until the caller lets go of it: those of one layer.
    """
    weights = weight.view(count, -1, weight.shape[1]).unbind(0)
    if bias is None:
        return [make(one) for one in weights]
    return [make(*one) for one in zip(weights, bias.view(count, -1).unbind(0), strict=True)]
