"""Passes a step through joined layers: in one call, or in a call for every few layers, to send their KV early."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from tandem.kernels.fused_layer import DenseLayers, PagedRows


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedStep:
    """A step's KV places. `on_layers(first, last)` is called when KV of layers [first, last) is stored: of all in steps
    of few rows, and else of `together` layers at a time."""

    paged: PagedRows
    on_layers: Callable[[int, int], None]
    together: int


def pass_layers(
    joined: DenseLayers, step: JoinedStep, x: Tensor, turns: tuple[Tensor, ...], rows: Tensor | None,
    finish: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:  # fmt: skip
    """The residual stream behind the last layer, [len(rows), hidden], of x [T, hidden] that is written over.

    turns: cosines and sines, [T, head_dim]. `finish` is the last layer behind its attention: there nothing looks at
    other tokens, and only the wanted rows go on.
    """
    cos, sin = turns
    if joined.takes_at_once(len(x), step.paged):
        x = joined(x, cos, sin, step.paged)
        step.on_layers(0, joined.layers)
        return x if rows is None else x.index_select(0, rows)
    mixed = x
    for first in range(0, joined.layers, step.together):
        last = min(first + step.together, joined.layers)
        mixed = joined.pass_chunks(x, cos, sin, step.paged, first, last, ends_attended=last == joined.layers)
        step.on_layers(first, last)
    if rows is not None:
        if not rows.numel():
            return x[:0]
        x, mixed = x.index_select(0, rows), mixed.index_select(0, rows)
    return finish(x, mixed)
