"""Quota of the pools for one peer's unadmitted reservations while others wait. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

SHARE = 4
"""One peer gets a quarter of every pool, or one request, whichever is larger."""


def is_over(held: Sequence[int], needs: Sequence[int], pools: Sequence[int]) -> bool:
    """True if a peer with `held[i]` reserved blocks of KV group i would get too much with `needs[i]` more.

    `pools[i]` is the group's size in blocks. A peer that holds nothing is never over: one request fits every share.
    """
    if not any(held):
        return False
    return any(have + need > size // SHARE for have, need, size in zip(held, needs, pools, strict=True))
