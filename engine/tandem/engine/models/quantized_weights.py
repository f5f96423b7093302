"""Which parameters of a decoder `--quantize` makes smaller, and the products that are made of them.

Every matrix that rows are multiplied with is quantised as soon as it is loaded, each expert's by itself. The embedding
and the routers of experts stay as they are: a score that is a little off chooses other experts.
"""

from __future__ import annotations

from collections.abc import Iterable

from tandem.engine.linear import Linear
from tandem.engine.models.experts import ExpertParameters
from tandem.engine.quantizing import Quantizer
from tandem.engine.weights import Parameter
from tandem.kernels.quantized_linear import QuantizedWeight


class QuantisedWeights:
    """Of one rank's decoder, whose layers' experts are `experts`, `count` in each. Not thread-safe."""

    def __init__(
        self, quantizer: Quantizer, embedding: Parameter, experts: Iterable[ExpertParameters], count: int
    ) -> None:
        layers = list(experts)
        self._quantizer = quantizer
        self._plain = {id(embedding), *(id(layer.router) for layer in layers)}
        self._counts = {id(stack): count for layer in layers for stack in (layer.gate_up, layer.down)}
        self._made: dict[int, list[QuantizedWeight]] = {}  # by id of the parameter, until its products are made

    def takes(self, parameter: Parameter) -> bool:
        """Whether rows are multiplied with it, and nothing else is done with it."""
        return parameter.columns is not None and id(parameter) not in self._plain

    def bytes_of(self, parameters: Iterable[Parameter]) -> int:
        """Memory of these, quantised, and what products of many rows need beside them."""
        shapes = []
        for parameter in parameters:
            count, (rows, columns) = self._counts.get(id(parameter), 1), parameter.tensor.shape
            shapes += [(rows // count, columns)] * count
        return self._quantizer.bytes_of(shapes)

    def quantise(self, parameter: Parameter) -> None:
        """At once when it is loaded, and its tensor is given up: a second copy of a model would not fit."""
        if self.takes(parameter):
            count, columns = self._counts.get(id(parameter), 1), parameter.tensor.shape[1]
            every = parameter.tensor.view(count, -1, columns).unbind(0)
            self._made[id(parameter)] = [self._quantizer.weight(one) for one in every]
            parameter.tensor = parameter.tensor.to("meta")

    def linears(self, parameter: Parameter, bias: Parameter | None) -> list[Linear]:
        """The products of one that was quantised, with `bias`: one of each expert, or a single one."""
        made = self._made.pop(id(parameter))
        if bias is None:
            return [self._quantizer.linear(weight, None) for weight in made]
        biases = bias.tensor.view(len(made), -1).unbind(0)
        return [self._quantizer.linear(*each) for each in zip(made, biases, strict=True)]
