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
        return Routing(chosen, weights / row_sums(weights) if self._is_normed else weights)


def row_sums(weights: Tensor) -> Tensor:
    """[T, 1], added from left to right: the order of torch.sum depends on the shape."""
    first, *others = weights.unbind(1)
    total = first.clone()
    for other in others:
        total += other
    return total[:, None]


class ChosenSoftmaxRouter:
    """The largest scores; their softmax, without the others, are the weights (gpt-oss)."""

    def __init__(self, experts: ExpertsConfig, linear: Linear, correction: Tensor | None = None) -> None:
        self._linear, self._per_token = linear, experts.per_token

    def __call__(self, x: Tensor) -> Routing:
        scores, chosen = self._linear(x).topk(self._per_token, -1)
        return Routing(chosen, torch.softmax(scores, -1, dtype=torch.float32).to(x.dtype).float())
