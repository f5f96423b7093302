"""Choosing among experts by groups, as DeepSeek does; see `routing.py` for the requirements of a router.

Softmax: groups are kept by their best expert (DeepSeek-V2, section 2.2.2). Sigmoid: by their two best, by scores with
a correction (DeepSeek-V3, section 2.1.2).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.engine.experts_config import ExpertsConfig
from tandem.engine.linear import Linear
from tandem.engine.models.routing import Routing, row_sums

_TINY = 1e-20
"""Added to the sum that weights are divided by, as in transformers."""


class GroupedSoftmaxRouter:
    """Probabilities over all experts; the largest of the kept groups, times `scaling`."""

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
    """A sigmoid of each score; `correction` [count], fp32, is added where experts are chosen, not to their weights."""

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
            weights = weights / (row_sums(weights) + _TINY)
        return Routing(chosen, weights * experts.scaling)


def _within(scores: Tensor, of_groups: Tensor, experts: ExpertsConfig, *, hidden: float) -> Tensor:
    """`scores` [T, count] with `hidden` outside the groups with the largest `of_groups` [T, groups]."""
    left = torch.ones_like(of_groups, dtype=torch.bool)
    left.scatter_(1, of_groups.topk(experts.chosen_groups, -1).indices, value=False)
    return scores.masked_fill(left.repeat_interleave(experts.count // experts.groups, 1), hidden)


def _sigmoid(x: Tensor) -> Tensor:
    """The softmax of (x, 0), computed row by row; an elementwise sigmoid's bits depend on the place."""
    return torch.softmax(torch.stack((x, torch.zeros_like(x)), -1), -1)[..., 0]
