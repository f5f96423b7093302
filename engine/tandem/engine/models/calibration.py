"""Finds the inputs that matter to quantised matrices: random tokens bring them.

A few inputs of a real model's matrices are a hundred times the others, and the same ones whatever the text is. So
tokens that are drawn at random tell them apart about as well as a text does (docs/models.md), and nothing has to be
given. They pass each layer once it is loaded, before it is quantised: one layer at a time is in memory as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from tandem.engine.linear import Linear, make_linear
from tandem.engine.models.quantized_weights import QuantisedWeights
from tandem.engine.weights import Parameter
from tandem.kernels.attention_reference import AttentionSpec, attend_span

SEED = 0
_LEAST_SHARE = 1e-3
"""Of the mean: columns that none of the tokens used may be used by others."""


class WeightCalibration:
    """Of one load of a decoder, on one rank. `states` [tokens, hidden] are behind the last layer that was quantised.

    `ends`: the index of each layer by the id of the parameter that is loaded last.
    """

    def __init__(
        self, quantised: QuantisedWeights, ends: Mapping[int, int], vocab_size: int, max_positions: int
    ) -> None:
        self.ends = ends
        count = min(quantised.calibration_tokens, max_positions)
        self.tokens = torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(SEED))
        self.states = torch.empty(0)
        self.is_running = False
        """True while `run` builds and passes a layer of plain weights."""
        self._quantised = quantised
        self._waiting: list[Parameter] = []
        self._squares: dict[tuple[int, int], Tensor] = {}

    def waits(self, parameter: Parameter) -> None:
        """Keep it as it was loaded until its layer is there."""
        self._waiting.append(parameter)

    def run(self, layer: Callable[[Tensor], Tensor]) -> None:
        """Pass the states through the `layer` of what waits, and quantise that."""
        self.is_running = True
        self.states = layer(self.states)
        self.is_running = False
        for parameter in self._waiting:
            count = self._quantised.count_of(parameter)
            self._quantised.quantise(parameter, [self._squares.pop((id(parameter), one), None) for one in range(count)])
        self._waiting.clear()
        self._squares.clear()

    def quantise_head(self, head: Parameter, norm: Callable[[Tensor], Tensor]) -> None:
        """Quantise a head that is no embedding; `norm` is the one before it."""
        self._quantised.quantise(head, [self.importance_of_head(norm)])

    def importance_of_head(self, norm: Callable[[Tensor], Tensor]) -> Tensor:
        return _importance(norm(self.states))

    def linears(self, weight: Parameter, bias: Parameter | None) -> list[Linear]:
        """Products with a plain parameter, one of each expert or a single one, which observe what they multiply."""
        count = self._quantised.count_of(weight)
        matrices = weight.tensor.view(count, -1, weight.tensor.shape[1]).unbind(0)
        biases = [None] * count if bias is None else bias.tensor.view(count, -1).unbind(0)
        return [
            self._observed((id(weight), index), make_linear(matrix, one, is_deterministic=True))
            for index, (matrix, one) in enumerate(zip(matrices, biases, strict=True))
        ]

    def _observed(self, key: tuple[int, int], linear: Linear) -> Linear:
        def observe(x: Tensor) -> Tensor:
            self._squares[key] = _importance(x)
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


def _importance(x: Tensor) -> Tensor:
    """Mean squares of the columns of x [T, columns], fp32."""
    squares = x.float().square().mean(0)
    return squares.clamp_min_(_LEAST_SHARE * float(squares.mean()) + torch.finfo(torch.float32).tiny)
