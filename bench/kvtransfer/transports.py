"""Throughput and latency of every transport, pool to pool with checksums, beside the bare way of the same bytes.

Processor time counts all threads of both processes; unlike the clock it hardly depends on other load of the machine.
Ours and the bare way take turns in the same two processes, many short batches each; figures are medians over batches
(throughput) and quantiles over transfers (latency). A transfer lasts from its opening to the notice that it is
verified, a bare one from its first byte to the receiver's answer.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from bench.kvtransfer import pools
from bench.kvtransfer.children import Child
from bench.report import Row, quantile

TRANSPORTS = ("shm", "tcp", "grpc", "gloo")
SIZES = (64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
AT_ONCE = (8, 64)
CHUNK = 1 << 20
BATCH_BYTES = 64 << 20
AIMS = {"shm": 0.6, "tcp": 0.8, "grpc": 0.8, "gloo": 0.8}


@dataclass(frozen=True, slots=True)
class Run:
    """One batch: seconds for all, seconds for each, processor seconds of both ends."""

    all_s: float
    each_s: list[float]
    processor_s: float


@dataclass(slots=True)
class Samples:
    """Measurements of the batches of one way."""

    bytes_per_s: list[float] = field(default_factory=list)
    each_s: list[float] = field(default_factory=list)
    processor_s_per_byte: list[float] = field(default_factory=list)

    def add(self, size: int, run: Run) -> None:
        self.bytes_per_s.append(size / run.all_s)
        self.each_s += run.each_s
        self.processor_s_per_byte.append(run.processor_s / size)


class Pair:
    """A sender's and a receiver's process, connected."""

    def __init__(
        self,
        transport: str,
        *,
        spec: str = "square",
        host: str = "127.0.0.1",
        prefixes: Sequence[Sequence[str]] = ((), ()),
        environment: dict[str, str] | None = None,
    ) -> None:
        module = "bench.kvtransfer.ends"
        options = {"transport": transport, "spec": spec, "host": host}
        self.block_bytes = pools.SPECS[spec].block_bytes()
        self.transport = transport
        self._number = 1
        self._children = [
            Child(module, prefix=prefixes[1], environment=environment, role="receiver", **options),
            Child(module, prefix=prefixes[0], environment=environment, role="sender", **options),
        ]
        self.receiver, self.sender = self._children
        hello = self.receiver.answer()
        self.sender.answer()
        self.sender.call("connect", endpoints=hello["endpoints"], bare_address=hello["bare"])

    def ours(self, size: int, count: int, at_once: int = 1, codec: str = "") -> Run:
        """Move `count` transfers of `size` bytes. Raises if a byte is wrong."""
        blocks = size // self.block_bytes
        first, self._number = self._number, self._number + count
        self.receiver.call("expect", first=first, count=count, blocks=blocks, codec=codec)
        before_s = self._receiver_s()
        sent = self.sender.call("send", first=first, count=count, blocks=blocks, at_once=at_once, codec=codec)
        used_s = self._receiver_s() - before_s + sent["processor_s"]
        settled = self.receiver.call("settle", count=count, blocks=blocks)
        if sent["transport"] != self.transport:
            raise RuntimeError(f"{sent['transport']} in place of {self.transport}")
        if not codec and settled["checksum"] != sent["checksum"]:
            raise RuntimeError(f"{self.transport} moved wrong bytes")
        return Run(sent["all_s"], sent["each_s"], used_s)

    def bare(self, size: int, count: int) -> Run:
        """The same without Tandem."""
        sizes = [size] * count
        before_s = self._receiver_s()
        self.receiver.begin("bare", sizes=sizes, chunk=CHUNK)
        sent = self.sender.call("bare", sizes=sizes, chunk=CHUNK)
        self.receiver.answer()
        return Run(sent["all_s"], sent["each_s"], self._receiver_s() - before_s + sent["processor_s"])

    def _receiver_s(self) -> float:
        return float(self.receiver.call("processor")["processor_s"])

    def close(self) -> None:
        for child in self._children:
            child.close()


@contextmanager
def pair(transport: str, **options: Any) -> Iterator[Pair]:
    made = Pair(transport, **options)
    try:
        yield made
    finally:
        made.close()


def measure(both: Pair, size: int, at_once: int, seconds: float, codec: str = "") -> tuple[Samples, Samples]:
    """Ours and the bare way in turns, `seconds` each or three batches. Bare bytes come as one stream."""
    count = max(at_once, min(64, BATCH_BYTES // size))
    ours, bare = Samples(), Samples()
    both.ours(size, count, at_once, codec)
    both.bare(size * at_once, count // at_once)
    spent_s = 0.0
    while spent_s < 2 * seconds or len(ours.bytes_per_s) < 3:
        started_s = time.perf_counter()
        ours.add(size * count, both.ours(size, count, at_once, codec))
        bare.add(size * count, both.bare(size * at_once, count // at_once))
        spent_s += time.perf_counter() - started_s
    return ours, bare


def run(transports: Sequence[str], seconds: float, *, is_pinned: bool = False) -> list[Row]:
    """All rows of these transports. `is_pinned`: P on the first core, D on the last, against the scheduler."""
    cores = sorted(os.sched_getaffinity(0))
    prefixes = [("taskset", "-c", str(core)) for core in (cores[0], cores[-1])] if is_pinned else ((), ())
    rows: list[Row] = []
    for transport in transports:
        with pair(transport, prefixes=prefixes) as both:
            for size in SIZES:
                rows += _rows(transport, size, 1, *measure(both, size, 1, seconds))
            for at_once in AT_ONCE:
                rows += _rows(transport, CHUNK, at_once, *measure(both, CHUNK, at_once, seconds))
        with pair(transport, spec="135m", prefixes=prefixes) as both:
            size = 32 * both.block_bytes
            rows += _rows(f"{transport}, 30 layers, 3 heads", size, 1, *measure(both, size, 1, seconds))
    return rows


def human(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def _rows(name: str, size: int, at_once: int, ours: Samples, bare: Samples) -> list[Row]:
    case = f"{name}, {human(size)}" + (f", {at_once} at once" if at_once > 1 else "")
    speeds = [statistics.median(samples.bytes_per_s) / (1 << 30) for samples in (ours, bare)]
    rows = [Row(case, "throughput", speeds[0], "GiB/s", speeds[1])]
    work = [1e6 * (1 << 20) * statistics.median(samples.processor_s_per_byte) for samples in (ours, bare)]
    rows.append(Row(case, "processor time, both ends", work[0], "us/MiB", work[1]))
    for percent in (50, 99):
        at = [1e3 * quantile(samples.each_s, percent) for samples in (ours, bare)]
        rows.append(Row(case, f"latency p{percent}", at[0], "ms", at[1] if at_once == 1 else None))
    return rows
