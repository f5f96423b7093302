"""Chooses the implementation of an operation: Triton kernel, C code on the CPU, or torch reference.

Owns that choice and the one environment variable that overrides it. It must not import Triton: a machine without it
still runs every reference.
"""

from __future__ import annotations

import os

import torch

AUTO = "auto"
REFERENCE = "reference"
TRITON = "triton"
BACKENDS = (AUTO, REFERENCE, TRITON)
ENVIRONMENT_VARIABLE = "TANDEM_KERNELS"

_chosen = os.environ.get(ENVIRONMENT_VARIABLE, AUTO)


def uses_triton(device: torch.device, override: str | None = None) -> bool:
    """True if tensors on `device` go to the Triton kernel.

    `override` wins over the value of the environment variable `TANDEM_KERNELS` at process start, which wins over
    `auto`: Triton on CUDA devices, the reference elsewhere. `triton` for CPU tensors works in Triton's interpreter only
    (`TRITON_INTERPRET=1`).
    Raises ValueError for an unknown name.
    """
    name = _name(override)
    if name == AUTO:
        return device.type == "cuda"
    return name == TRITON


def uses_native(device: torch.device, override: str | None = None) -> bool:
    """True if tensors on `device` may go to C code or torch's own kernels: on the CPU, unless another backend was named
    as above.

    Raises ValueError for an unknown name.
    """
    return device.type == "cpu" and _name(override) == AUTO


def use(name: str) -> str:
    """Use another backend from now on, for measurements; returns the one before."""
    global _chosen
    before, _chosen = _chosen, name
    return before


def _name(override: str | None) -> str:
    name = _chosen if override is None else override
    if name not in BACKENDS:
        raise ValueError(f"unknown kernel backend {name!r}: expected one of {', '.join(BACKENDS)}")
    return name
