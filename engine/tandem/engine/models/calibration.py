"""Finds the inputs that matter to quantised matrices: those of a text, or of random tokens.

A few inputs of a real model's matrices are a hundred times the others, and the same ones whatever the text is. So
random tokens tell them apart well enough for 8 bits. For 4 bits the usual text does, and how inputs of layers go
together the text of a user (docs/models.md). Tokens pass each layer once it is loaded, before it is quantised: one
layer at a time is in memory as it was.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from tandem.core.logs import event
from tandem.engine.calibration_text import PIECE
from tandem.engine.linear import Linear, make_linear
from tandem.engine.models.quantized_weights import QuantisedWeights
from tandem.engine.weights import Parameter
from tandem.kernels.attention_reference import AttentionSpec, attend_span
from tandem.kernels.float_linear import LIBRARY as FLOAT_LINEAR
from tandem.kernels.float_linear import FloatLinear

SEED = 0
_LEAST_SHARE = 1e-3
"""Of the mean: columns that none of the tokens used may be used by others."""
_SAID_EVERY_S = 5.0
_log = logging.getLogger(__name__)


class WeightCalibration:
    """Of one load of a decoder, on one rank. `states` [tokens, hidden] are behind the last layer that was quantised.

    `ends`: the index of each layer by the id of the parameter that is loaded last.
    """

    def __init__(
        self, quantised: QuantisedWeights, ends: Mapping[int, int], vocab_size: int, max_positions: int
    ) -> None:
        self.ends, text = ends, quantised.calibration
        count = min(quantised.calibration_tokens, max_positions)
        self.tokens = torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(SEED))
        if text.tokens:
            self.tokens = torch.tensor(text.tokens)
        self._has_products = text.is_given and quantised.uses_products
        self._sequence = min(PIECE, max_positions)
        self._said_s = time.monotonic()
        self.states = torch.empty(0)
        self.is_running = False
        """True while `run` builds and passes a layer of plain weights."""
        self._quantised = quantised
        self._waiting: list[Parameter] = []
        self._met: dict[tuple[int, int], _Inputs] = {}

    def waits(self, parameter: Parameter) -> None:
        """Keep it as it was loaded until its layer is there."""
        self._waiting.append(parameter)

    def run(self, index: int, build: Callable[[], Callable[[Tensor], Tensor]]) -> None:
        """Pass the states through layer `index`, which `build` makes of what waits, and quantise that."""
        if time.monotonic() - self._said_s > _SAID_EVERY_S:
            self._said_s = time.monotonic()
            event(_log, "calibrating", logging.INFO, layer=index, layers=len(self.ends), tokens=len(self.tokens))
        self.is_running = True
        layer = build()
        self.states = torch.cat([layer(sequence) for sequence in self._sequences()])
        self.is_running = False
        for parameter in self._waiting:
            met = [self._met.pop((id(parameter), one), None) for one in range(self._quantised.count_of(parameter))]
            self._quantised.quantise(parameter, [None if one is None else one.importance() for one in met])
        self._waiting.clear()
        self._met.clear()

    def quantise_head(self, head: Parameter, norm: Callable[[Tensor], Tensor]) -> None:
        """Quantise a head that is no embedding; `norm` is the one before it."""
        self._quantised.quantise(head, [self.importance_of_head(norm)])

    def importance_of_head(self, norm: Callable[[Tensor], Tensor]) -> Tensor:
        """Of the head's inputs, by products where it gains from them: any text tells these well enough."""
        met = _Inputs(has_products=self._quantised.uses_products)
        for sequence in self._sequences():
            met.add(norm(sequence))
        return met.importance()

    def _sequences(self) -> Iterator[Tensor]:
        for first in range(0, len(self.states), self._sequence):
            yield self.states[first : first + self._sequence]

    def linears(self, weight: Parameter, bias: Parameter | None) -> list[Linear]:
        """Products with a plain parameter, one of each expert or a single one, which observe what they multiply."""
        count = self._quantised.count_of(weight)
        matrices = weight.tensor.view(count, -1, weight.tensor.shape[1]).unbind(0)
        biases = [None] * count if bias is None else bias.tensor.view(count, -1).unbind(0)
        return [
            self._observed((id(weight), index), _same_for_any_threads(matrix, one))
            for index, (matrix, one) in enumerate(zip(matrices, biases, strict=True))
        ]

    def _observed(self, key: tuple[int, int], linear: Linear) -> Linear:
        def observe(x: Tensor) -> Tensor:
            if len(x):
                self._met.setdefault(key, _Inputs(has_products=self._has_products)).add(x)
            return linear(x)

        return observe


def attend_causally(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """Attention of one sequence from its beginning: q [T, heads, width], k and v [T, kv_heads, width], as q."""
    tokens, heads, width = q.shape
    kv_heads = k.shape[1]
    places = torch.arange(tokens)
    hidden = places > places[:, None]
    if spec.window is not None:
        hidden |= places <= places[:, None] - spec.window
    rows = q.reshape(tokens, kv_heads, -1, width).transpose(0, 1).reshape(kv_heads, -1, width)
    sinks = spec.sinks_of_rows(kv_heads, tokens=tokens)
    hidden = hidden.repeat_interleave(heads // kv_heads, 0)[None]
    _, mixed = attend_span(rows, k.transpose(0, 1), v.transpose(0, 1), hidden, spec, sinks)
    return mixed.view(kv_heads, tokens, -1, width).transpose(0, 1).reshape(q.shape).to(q.dtype)


def _same_for_any_threads(weight: Tensor, bias: Tensor | None) -> Linear:
    if weight.dtype is torch.float32 and FLOAT_LINEAR.serves():
        return FloatLinear(weight, bias)
    return make_linear(weight, bias, is_deterministic=True)


class _Inputs:
    """Squares of the inputs of one matrix, or with `has_products` products of any two, summed up in fp32."""

    def __init__(self, *, has_products: bool) -> None:
        self._has_products, self._sum, self._rows = has_products, torch.zeros(1), 0

    def add(self, x: Tensor) -> None:
        """Inputs x [T, columns]; the sum is the same for any threads."""
        wide = x.float()
        if self._has_products:
            columns = wide.t().contiguous()
            found = _same_for_any_threads(columns, None)(columns)
        else:
            found = wide.square().sum(0)
        self._sum, self._rows = found.add_(self._sum), self._rows + len(x)

    def importance(self) -> Tensor:
        """Mean squares [columns] or mean products [columns, columns]; squares are at least _LEAST_SHARE of theirs."""
        found = self._sum / self._rows
        squares = found.diagonal() if self._has_products else found
        squares.clamp_min_(_LEAST_SHARE * float(squares.mean()) + torch.finfo(torch.float32).tiny)
        return found
