"""Routers: choose the experts of each token of a layer, and their weights; one class for each way of choosing.

With `--deterministic` a row's choice must not depend on the other rows: only operations that compute rows alone, none
with a result that depends on where threads or vectors split the tensor (an elementwise exp or sigmoid does).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.engine.experts_config import ExpertsConfig
from tandem.engine.linear import Linear

_TINY = 1e-20
"""Added to the sum that weights of `CorrectedSigmoidRouter` are divided by, as in transformers."""


class Routing(NamedTuple):
    """Of every token: its experts, int64 [T, per_token], none twice, and their weights, fp32 [T, per_token]."""

    experts: Tensor
    weights: Tensor


Router = Callable[[Tensor], Routing]
"""x [T, hidden] to the experts of its rows; the same bits on every rank."""


class SoftmaxRouter:
    """Probabilities over all experts, in fp32, of which the largest are taken (Shazeer et al. 2017, section 2.1).

    `linear` makes a score for every expert: [T, hidden] to [T, count].
    """

    def __init__(self, experts: ExpertsConfig, linear: Linear, correction: Tensor | None = None) -> None:
        self._linear, self._per_token, self._is_normed = linear, experts.per_token, experts.is_normed

    def __call__(self, x: Tensor) -> Routing:
        probabilities = torch.softmax(self._linear(x), -1, dtype=torch.float32)
        weights, chosen = probabilities.topk(self._per_token, -1)
        return Routing(chosen, weights / _row_sums(weights) if self._is_normed else weights)


class ChosenSoftmaxRouter:
    """The largest scores; their softmax, without the others, are the weights (gpt-oss)."""

    def __init__(self, experts: ExpertsConfig, linear: Linear, correction: Tensor | None = None) -> None:
        self._linear, self._per_token = linear, experts.per_token

    def __call__(self, x: Tensor) -> Routing:
        scores, chosen = self._linear(x).topk(self._per_token, -1)
        return Routing(chosen, torch.softmax(scores, -1, dtype=torch.float32).to(x.dtype).float())


class GroupedSoftmaxRouter:
    """Probabilities over all experts; the largest of the groups that have the best ones, times `scaling` (DeepSeek-V2,
    section 2.2.2)."""

    def __init__(self, experts: ExpertsConfig, linear: Linear, correction: Tensor | None = None) -> None:
        self._experts, self._linear = experts, linear

    def __call__(self, x: Tensor) -> Routing:
        experts = self._experts
        scores = torch.softmax(self._linear(x.float()), -1)
        if experts.groups > 1:
            best = scores.view(len(scores), experts.groups, -1).amax(-1)
            scores = _within(scores, best, experts, hidden=0.0)
        weights, chosen = scores.topk(experts.per_token, -1)
        return Routing(chosen, weights * experts.scaling)


class CorrectedSigmoidRouter:
    """A sigmoid of each score; `correction` [count], fp32, is added where experts are chosen, not to their weights.

    Groups are kept by their two best, with the correction (DeepSeek-V3, section 2.1.2).
    """

    def __init__(self, experts: ExpertsConfig, linear: Linear, correction: Tensor | None = None) -> None:
        assert correction is not None
        self._experts, self._linear, self._correction = experts, linear, correction

    def __call__(self, x: Tensor) -> Routing:
        experts = self._experts
        scores = _sigmoid(self._linear(x.float()))
        corrected = scores + self._correction
        if experts.groups > 1:
            members = corrected.view(len(corrected), experts.groups, -1)
            best = members.topk(min(2, members.shape[-1]), -1).values.sum(-1)
            corrected = _within(corrected, best, experts, hidden=float("-inf"))
        chosen = corrected.topk(experts.per_token, -1).indices
        weights = scores.gather(1, chosen)
        if experts.is_normed:
            weights = weights / (_row_sums(weights) + _TINY)
        return Routing(chosen, weights * experts.scaling)


ROUTERS: dict[str, Callable[[ExpertsConfig, Linear, Tensor | None], Router]] = {
    "softmax": SoftmaxRouter, "chosen_softmax": ChosenSoftmaxRouter, "softmax by groups": GroupedSoftmaxRouter,
    "sigmoid by groups": CorrectedSigmoidRouter,
}  # fmt: skip
"""By `ExpertsConfig.routing`; made of the experts, the product that scores them, and the correction, or None."""


def _row_sums(weights: Tensor) -> Tensor:
    """[T, 1], added from left to right: the order of torch.sum depends on the shape."""
    first, *others = weights.unbind(1)
    total = first.clone()
    for other in others:
        total += other
    return total[:, None]


def _within(scores: Tensor, of_groups: Tensor, experts: ExpertsConfig, *, hidden: float) -> Tensor:
    """`scores` [T, count] with `hidden` outside the groups with the largest `of_groups` [T, groups]."""
    left = torch.ones_like(of_groups, dtype=torch.bool)
    left.scatter_(1, of_groups.topk(experts.chosen_groups, -1).indices, value=False)
    return scores.masked_fill(left.repeat_interleave(experts.count // experts.groups, 1), hidden)


def _sigmoid(x: Tensor) -> Tensor:
    """The softmax of (x, 0), computed row by row; an elementwise sigmoid's bits depend on the place."""
    return torch.softmax(torch.stack((x, torch.zeros_like(x)), -1), -1)[..., 0]
