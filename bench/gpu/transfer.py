"""KV from one process to another on one GPU, over `cuda_ipc`: every byte right, a flipped bit found, then how fast.

The limit is the device's own copy: a transfer reads and writes every byte three times (gather, copy, scatter) and reads
it twice more for the checksums. A rehearsal takes `cpu_ipc`, the same code over host memory.
"""

from __future__ import annotations

import queue
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.gpu.machine import seconds
from bench.gpu.report import Case, Report
from bench.gpu.transfer_end import G0, RECEIVER, SECRET, SPEC, device_pool, ticket
from bench.kvtransfer.children import Child
from tandem.core.clock import MonotonicClock
from tandem.core.ids import Rank
from tandem.kernels.payload_checksum import payload_checksum
from tandem.kvtransfer.receiver import TransferReceiver

PATIENCE_S = 60.0
REPEATS = 10


def cases(device: torch.device, *, rehearsal: bool) -> Iterator[Case]:
    transport = "cpu_ipc" if rehearsal else "cuda_ipc"
    yield "payload checksum", partial(_checksum, device=device, rehearsal=rehearsal)
    yield "flipped bits", partial(_flips, device=device, transport=transport)
    for blocks in (2,) if rehearsal else (1, 16, 256):
        yield f"{blocks} blocks", partial(_speed, device=device, transport=transport, blocks=blocks)


def _checksum(report: Report, device: torch.device, rehearsal: bool) -> None:
    """Kernel against reference, and its share of the time that a copy of the same bytes takes."""
    for size in (1, 8191, 70_001) if rehearsal else (1, 8191, 70_001, 8 << 20, 16 << 20):
        data = torch.randint(256, (size,), dtype=torch.uint8, device=device)
        wrong = payload_checksum(data, backend="triton") != payload_checksum(data, backend="reference")
        report.add(f"payload_checksum {size} bytes", "differs", float(wrong), "error", 0)
    from tandem.kernels.payload_checksum.triton import weighted_sum_triton

    for size in (1 << 16,) if rehearsal else (1 << 20, 8 << 20, 256 << 20):
        data = torch.randint(256, (size,), dtype=torch.uint8, device=device)
        target = torch.empty_like(data)
        copied = seconds(device, partial(target.copy_, data))
        summed = seconds(device, partial(weighted_sum_triton, data))
        report.add(f"payload_checksum {size} bytes", "read", size / summed / 1e9, "GB/s", size / copied / 1e9)


def _flips(report: Report, device: torch.device, transport: str) -> None:
    """A bit that flips between checksum and copy: never a verified transfer."""
    with Pair(device, transport, 2, is_flipping=True) as pair:
        outcomes = [pair.move(2)[1] for _ in range(3)]
    report.add("flipped bits", "transfers admitted", float(outcomes.count("Verified")), "error", 0)


def _speed(report: Report, device: torch.device, transport: str, blocks: int) -> None:
    size = blocks * SPEC.block_bytes()
    copied = report.value("machine", "copy bandwidth") / 2  # bytes moved, not read and written
    with Pair(device, transport, blocks) as pair:
        taken = sorted(pair.move(blocks)[0] for _ in range(1 + REPEATS))
        outcome = pair.move(blocks)[1]
        report.add(f"{transport} {blocks} blocks", "not verified", float(outcome != "Verified"), "error", 0)
        report.add(f"{transport} {blocks} blocks", "numbers that differ", pair.differences(), "error", 0)
    median = taken[len(taken) // 2]
    report.add(f"{transport} {blocks} blocks", "ticket to verified", median * 1e3, "ms")
    report.add(f"{transport} {blocks} blocks", "moved", size / median / 1e9, "GB/s", copied)


class Pair:
    """A receiver here and a sender in a process of its own, both on one device."""

    def __init__(self, device: torch.device, transport: str, blocks: int, *, is_flipping: bool = False) -> None:
        self._device, self._number, self._blocks = device, 0, blocks
        pool, self._numbers = device_pool(blocks, device, seed=0)
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._folder = tempfile.TemporaryDirectory(prefix="gpubench-")
        self._receiver = TransferReceiver(
            incarnation=RECEIVER, rank=Rank(0), pools={G0: pool}, secret=SECRET,
            runtime_dir=Path(self._folder.name), transports=(transport,), on_event=self._events.put,
            clock=MonotonicClock(),
        )  # fmt: skip
        self._receiver.start()
        self._sender = Child(
            "bench.gpu.transfer_end", device=str(device), transport=transport, blocks=blocks, is_flipping=is_flipping
        )
        assert self._sender.answer()["is_ready"]

    def move(self, blocks: int) -> tuple[float, str]:
        """(seconds until all is verified and in place, the receiver's last event) of one transfer."""
        self._number += 1
        made = ticket(self._number, blocks, self._receiver.endpoints())
        self._receiver.expect(made)
        began_s = time.perf_counter()
        endpoints = [asdict(endpoint) for endpoint in made.endpoints]
        self._sender.begin("push", number=self._number, blocks=blocks, endpoints=endpoints)
        event = type(self._events.get(timeout=PATIENCE_S)).__name__
        taken_s = time.perf_counter() - began_s
        self._sender.answer()
        self._receiver.cancel(made.transfer)
        return taken_s, event

    def differences(self) -> float:
        """Numbers that are not the sender's."""
        _, expected = device_pool(self._blocks, self._device, seed=1)
        return float((self._numbers != expected).sum())

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self._sender.close()
        self._receiver.close()
        self._folder.cleanup()
