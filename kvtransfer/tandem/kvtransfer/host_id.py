"""Identifies this machine. A sender thus knows whether shared memory can work and clocks can be compared."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def host_id() -> str:
    """`boot:view`: the kernel's boot and its clock, then what distinguishes containers on it (pid namespace, name).

    Equal ids make shared memory worth a try, no more: the attempt to connect decides.
    """
    return f"{_boot()}:{_namespace('pid')}.{socket.gethostname()}"


def shares_clock(host: str, other: str) -> bool:
    """True if monotonic clocks of two host ids have one origin."""
    return host.partition(":")[0] == other.partition(":")[0]


def _boot() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return f"unknown-{socket.gethostname()}"
    return f"{boot}.{_namespace('time')}"


def _namespace(kind: str) -> str:
    """Inode of one of this process's namespaces, empty where the kernel does not provide it."""
    try:
        return os.readlink(f"/proc/self/ns/{kind}").partition("[")[2].rstrip("]")
    except OSError:
        return ""
