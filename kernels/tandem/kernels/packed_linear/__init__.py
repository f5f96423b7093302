"""Matrix products of bfloat16 rows with a fixed weight on the CPU, from one packed copy of it.

oneDNN packs the weight and has many rows; few rows go to C code that reads the same bytes at memory's speed. How oneDNN
packs is its own business: a weight whose bytes are not found where the C code looks for them is left to oneDNN alone.
"""

from __future__ import annotations

from tandem.kernels.packed_linear.packed import PackedLinear, packs

__all__ = ["PackedLinear", "packs"]
