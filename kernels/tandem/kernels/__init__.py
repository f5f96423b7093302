"""Compute kernels of the engine, one folder an operation.

Owns the arithmetic and the memory access of each operation, nothing else: no model, no scheduler, no network. Every
folder holds `reference.py` (torch, the specification), where the GPU has a kernel of its own `triton.py`, and where
torch is slow on the CPU `cpu.c`; its `__init__` checks the arguments and dispatches.
"""
