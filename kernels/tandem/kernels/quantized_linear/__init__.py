"""Matrix products with weights of 8 or 4 bits on the CPU: rows are quantised as they come (W8A8, W4A8).

A weight has a scale a column; of 4 bits also a whole one for 32 neighbours, so that its numbers are numbers of 8 bits
again. Both kinds are sums of products of whole numbers, the same to the last bit in C, in oneDNN and in torch. Few rows
go to C code (AVX512-VNNI or AVX2) that reads the bytes once at memory's speed; many too, where there is VNNI and no
matrix unit, and to oneDNN elsewhere.
"""

from __future__ import annotations

from tandem.kernels.quantized_linear.linear import QuantizedLinear
from tandem.kernels.quantized_linear.weight import BITS, QuantizedWeight, Unpacked, packed_bytes, unpacked_bytes

__all__ = ["BITS", "QuantizedLinear", "QuantizedWeight", "Unpacked", "packed_bytes", "unpacked_bytes"]
