"""Gathers the digests of all ranks: each rank has judged its own heads, the token depends on every one.

With all blocks good every rank has the same digests, whatever heads it holds, so neither TP nor repeated heads count.
Imports torch inside `gather`, with several ranks only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tandem.engine.sim.arithmetic import mix

if TYPE_CHECKING:
    from tandem.engine.parallel import TensorGroup


def gather(digests: Sequence[int], group: TensorGroup | None) -> list[int]:
    """The digests of a step's logit rows over all ranks, on rank 0; elsewhere an empty list.

    A collective: every rank calls it in every step with logit rows. Raises WorkerLostError when a rank is gone.
    """
    if group is None or group.size == 1:
        return list(digests)
    import torch

    mine = torch.tensor(digests, dtype=torch.int64).view(-1, 1)
    return [_agreed(row) for row in group.gather_columns(mine).tolist()]


def _agreed(row: Sequence[int]) -> int:
    if row.count(row[0]) == len(row):
        return row[0]
    value = len(row)
    for each in row:
        value = mix(value, each)
    return value >> 3
