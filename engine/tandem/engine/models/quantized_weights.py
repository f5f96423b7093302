"""Selects the parameters of a decoder that `--quantize` makes smaller, and makes their products.

Every matrix that rows are multiplied with is quantised as soon as it is loaded, each expert's by itself. The embedding
and the routers of experts stay as they are: a score that is a little off chooses other experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from tandem.engine.linear import Linear, Quantizer
from tandem.engine.models.experts import ExpertParameters
from tandem.engine.weights import Parameter
from tandem.kernels.quantized_linear import QuantizedWeight


class QuantisedWeights:
    """Weights of one rank's decoder; its layers have `experts`, `count` in each. Not thread-safe."""

    def __init__(
        self, quantizer: Quantizer, embedding: Parameter, experts: Iterable[ExpertParameters], count: int
    ) -> None:
        layers = list(experts)
        self._quantizer = quantizer
        self._plain = {id(embedding), *(id(layer.router) for layer in layers)}
        self.calibration_tokens, self.calibration = quantizer.calibration_tokens, quantizer.calibration
        self.uses_products = quantizer.uses_products
        self._counts = {id(stack): count for layer in layers for stack in (layer.gate_up, layer.down)}
        self._made: dict[int, list[QuantizedWeight]] = {}  # by id of the parameter, until its products are made

    def takes(self, parameter: Parameter) -> bool:
        """True if rows are multiplied with it, and it has no other use."""
        return parameter.columns is not None and id(parameter) not in self._plain

    def bytes_of(self, parameters: Iterable[Parameter]) -> int:
        """Memory of these, quantised, and of the additional needs of products of many rows."""
        shapes = []
        for parameter in parameters:
            count, (rows, columns) = self.count_of(parameter), parameter.tensor.shape
            shapes += [(rows // count, columns)] * count
        return self._quantizer.bytes_of(shapes)

    def count_of(self, parameter: Parameter) -> int:
        """How many experts' matrices are stacked in it; 1 of any other."""
        return self._counts.get(id(parameter), 1)

    def quantise(self, parameter: Parameter, importances: Sequence[Tensor | None] | None = None) -> None:
        """Quantise at once when it is loaded, and give up its tensor: a second copy of a model would not fit.

        `importances`: of each expert's input columns, or the single matrix's; see `QuantizedWeight`.
        """
        if self.takes(parameter):
            count, columns = self.count_of(parameter), parameter.tensor.shape[1]
            every = zip(parameter.tensor.view(count, -1, columns).unbind(0), importances or [None] * count, strict=True)
            self._made[id(parameter)] = [self._quantizer.weight(*one) for one in every]
            parameter.tensor = parameter.tensor.to("meta")

    def linears(self, parameter: Parameter, bias: Parameter | None) -> list[Linear]:
        """The products of one that was quantised, with `bias`: one of each expert, or a single one."""
        made = self._made.pop(id(parameter))
        if bias is None:
            return [self._quantizer.linear(weight, None) for weight in made]
        biases = bias.tensor.view(len(made), -1).unbind(0)
        return [self._quantizer.linear(*each) for each in zip(made, biases, strict=True)]
