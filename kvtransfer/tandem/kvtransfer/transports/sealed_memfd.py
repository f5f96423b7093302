"""Shared memory with a sealed size: a peer that shrank it could end this process by SIGBUS."""

from __future__ import annotations

import fcntl
import os

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def make_sealed(name: str, size: int) -> int:
    """Return a descriptor of `size` zeros. Raises OSError."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def is_sealed(descriptor: int) -> bool:
    """True if its size can no longer be changed. Raises OSError for anything but shared memory."""
    return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS == _SEALS


def check_sealed(descriptor: int, size: int) -> None:
    """Raises OSError unless a peer's descriptor is sealed memory of `size` bytes."""
    if not is_sealed(descriptor):
        raise OSError("shared memory that is not sealed")
    if (found := os.fstat(descriptor).st_size) != size:
        raise OSError(f"shared memory of {found} bytes, expected {size}")
