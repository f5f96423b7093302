"""Matrix products with weights of 8 or 4 bits on the CPU: rows are quantised as they come (W8A16, W8A8, W4A8).

A weight has a scale a column; of 4 bits also a whole one and an offset for 32 neighbours, so that its numbers are
numbers of 8 bits again. A row of 16 bits is two of 8. All kinds are sums of products of whole numbers, the same to the
last bit in C (AMX, AVX512-VNNI or AVX2), in torch, and of rows of 8 bits in oneDNN, which multiplies where there is no
compiler. Weights of 8 bits have second numbers in the columns of the largest inputs, if rows have 16 bits.
"""

from __future__ import annotations

from tandem.kernels.quantized_linear.linear import QuantizedLinear
from tandem.kernels.quantized_linear.weight import FORMATS, QuantizedWeight, packed_bytes

__all__ = ["FORMATS", "QuantizedLinear", "QuantizedWeight", "packed_bytes"]
