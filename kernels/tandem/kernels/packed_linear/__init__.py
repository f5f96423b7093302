"""Matrix products of bfloat16 rows with a fixed weight on the CPU, from one packed copy of it.

oneDNN packs the weight and multiplies many rows; few rows go to C code that reads the same bytes at memory's speed. The
packed format is oneDNN's own: a weight is left to oneDNN alone if its bytes do not lie where the C code looks for them.
"""

from __future__ import annotations

from tandem.kernels.packed_linear.packed import PackedLinear, packs

__all__ = ["PackedLinear", "packs"]
