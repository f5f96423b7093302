"""forbid in torch: the specification, and the path for cases that `cpu.c` does not cover."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def forbid_reference(scores: Tensor, rows: Sequence[int], bits: Tensor) -> None:
    """See `forbid`."""
    if not rows:
        return
    shifts = torch.arange(8, device=scores.device)
    is_clear = (torch.arange(256, device=scores.device)[:, None] >> shifts & 1) == 0
    is_forbidden = is_clear[bits.long()].view(len(rows), -1)[:, : scores.shape[1]]
    places = torch.tensor(rows, device=scores.device)
    scores[places] = scores[places].masked_fill_(is_forbidden, -math.inf)
