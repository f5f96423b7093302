"""How clearly a model in transformers chose its experts: where two are nearly alike, rounding may choose the other."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

CLEAR = 1e-5
"""Between the logits of the last expert taken and the best one left: ten times what the order of fp32 sums changes."""


class RouterGap:
    """Watches the routers of `model`; `smallest` is of everything computed since it was last set to infinity."""

    def __init__(self, model: nn.Module) -> None:
        self.smallest = math.inf
        for module in model.modules():
            if type(module).__name__.endswith("TopKRouter"):
                module.register_forward_hook(self._look)

    def _look(self, router: Any, _given: Any, made: tuple[Tensor, ...]) -> None:
        best = made[0].float().topk(router.top_k + 1, -1).values
        self.smallest = min(self.smallest, float((best[..., -2] - best[..., -1]).min()))
