"""How clearly a model in transformers chose its experts: where two are nearly alike, rounding may choose the other."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

CLEAR = 1e-5
"""Between the logits of the last expert taken and the best one left: ten times what the order of fp32 sums changes."""


class RouterGap:
    """Watches the routers of `model`; `smallest` is of everything computed since it was last set to infinity."""

    def __init__(self, model: nn.Module) -> None:
        self.smallest = math.inf
        for module in model.modules():
            if type(module).__name__.lower().endswith("topkrouter"):
                module.register_forward_hook(self._look)

    def _look(self, router: Any, _given: Any, made: tuple[Tensor, ...]) -> None:
        for scores, taken in _choices(router, made[0].float()):
            best = scores.topk(taken + 1, -1).values
            self.smallest = min(self.smallest, float((best[..., -2] - best[..., -1]).min()))


def _choices(router: Any, logits: Tensor) -> Iterator[tuple[Tensor, int]]:
    """The scores of each choice, and how many were taken: of groups of experts, where there are some, then of
    experts."""
    groups, kept = getattr(router, "num_group", None) or 1, getattr(router, "topk_group", None) or 1
    correction = getattr(router, "e_score_correction_bias", None)
    if correction is not None:
        logits = logits.sigmoid() + correction
    if kept < groups:
        members = logits.view(*logits.shape[:-1], groups, -1)
        of_groups = members.amax(-1) if correction is None else members.topk(2, -1).values.sum(-1)
        yield of_groups, kept
        left = torch.ones_like(of_groups, dtype=torch.bool).scatter_(-1, of_groups.topk(kept, -1).indices, value=False)
        logits = members.masked_fill(left[..., None], float("-inf")).flatten(-2)
    yield logits, router.top_k
