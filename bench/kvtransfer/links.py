"""P and D in network namespaces of their own, the link between them capped: throughput as a share of the cap.

A veth pair with a token bucket (`tc … tbf`) on both ends. Uncapped, the limit is a plain socket through the same pair.
Needs root, `ip` and `tc`; where that is not given the part reports it and has no rows.
"""

from __future__ import annotations

import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.kvtransfer.transports import Pair, human, pair
from bench.report import Row
from tools.namespaces import NoNamespacesError, machines

CAPS = {"100 Mbit": 100e6 / 8, "1 Gbit": 1e9 / 8, "uncapped": None}
TRANSPORTS = ("tcp", "grpc", "gloo")
CODECS = ("int8", "fp8")
ADDRESSES = ("10.203.77.1", "10.203.77.2")
SECONDS = 0.8
BATCHES = 3


def run(transports: Sequence[str]) -> list[Row]:
    """Rows of every cap, transport and codec."""
    rows: list[Row] = []
    try:
        with tempfile.TemporaryDirectory(prefix="kvb-") as folder, machines(Path(folder), ADDRESSES) as found:
            names = [machine.namespace for machine in found]
            for cap, bytes_per_s in CAPS.items():
                _cap(names, cap, bytes_per_s)
                for transport in transports:
                    if transport in TRANSPORTS:
                        rows += _rows(names, transport, cap, bytes_per_s)
    except (NoNamespacesError, FileNotFoundError, subprocess.CalledProcessError) as error:
        if rows:
            raise
        reason = getattr(error, "stderr", b"") or str(error).encode()
        print(f"part links skipped: network namespaces are not to be had here: {reason.decode().strip()}")
    return rows


def _rows(names: Sequence[str], transport: str, cap: str, bytes_per_s: float | None) -> list[Row]:
    prefixes = [("ip", "netns", "exec", name) for name in names]
    rows = []
    with pair(transport, host=ADDRESSES[1], prefixes=prefixes) as both:
        size = _size(bytes_per_s)
        bare = statistics.median(_bare(both, size) for _ in range(BATCHES))
        case = f"{cap}, {transport}, {human(size)}"
        limit = bare if bytes_per_s is None else bytes_per_s
        if bytes_per_s is not None:
            rows.append(Row(case, "bare", bare / 1e6, "MB/s", limit / 1e6))
        plain = _speed(both, size, "")
        rows.append(Row(case, "throughput", plain / 1e6, "MB/s", limit / 1e6))
        for codec in CODECS if transport == "tcp" else ():
            rows.append(Row(case, f"KV moved as {codec}", _speed(both, size, codec) / 1e6, "MB/s", plain / 1e6))
    return rows


def _size(bytes_per_s: float | None) -> int:
    """A transfer of about SECONDS, 64 MiB at most, in whole MiB."""
    return 64 << 20 if bytes_per_s is None else min(64, max(1, round(bytes_per_s * SECONDS / (1 << 20)))) << 20


def _speed(both: Pair, size: int, codec: str) -> float:
    """Bytes a second, the median; the first transfer fills the bucket's windows and does not count."""
    times = [both.ours(size, 1, codec=codec).all_s for _ in range(BATCHES + 1)]
    return size / statistics.median(times[1:])


def _bare(both: Pair, size: int) -> float:
    return size / both.bare(size, 1).all_s


def _cap(names: Sequence[str], cap: str, bytes_per_s: float | None) -> None:
    """Limit both directions to `cap`; None removes the cap before it."""
    for name in names:
        if bytes_per_s is None:
            _do("tc", "-n", name, "qdisc", "del", "dev", "veth0", "root")
        else:
            rate, burst = f"{bytes_per_s * 8:.0f}bit", f"{max(64 << 10, int(bytes_per_s / 500))}b"
            _do("tc", "-n", name, "qdisc", "replace", "dev", "veth0", "root", "tbf", "rate", rate, "burst", burst,
                "latency", "50ms")  # fmt: skip


def _do(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
