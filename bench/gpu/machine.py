"""Limits of a device: its own copy bandwidth and matmul rate, against which everything else is held; and timing."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from typing import Any

import torch


def describe(device: torch.device) -> dict[str, Any]:
    """Names and versions, without which a number means nothing."""
    import triton

    facts: dict[str, Any] = {
        "device": "interpreter",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "device": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
        }
    return facts


def seconds(device: torch.device, work: Callable[[], Any], *, repeat: int = 20, graph: bool = True) -> float:
    """Median time of one call of `work`: replayed as a CUDA graph, or launched anew each time.

    On CPU (a rehearsal of the code, not a measurement) one call, timed by the clock.
    """
    if device.type != "cuda":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    run = work
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            work()
        run = captured.replay
        run()
    times = []
    for _ in range(repeat):
        start_mark = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end_mark = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start_mark.record()
        run()
        end_mark.record()
        torch.cuda.synchronize()
        times.append(float(start_mark.elapsed_time(end_mark)))
    return sorted(times)[repeat // 2] / 1e3


def copy_bytes_per_s(device: torch.device, size_bytes: int) -> float:
    """Bytes read plus bytes written a second by a copy inside device memory."""
    source = torch.empty(size_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size_bytes / seconds(device, lambda: target.copy_(source))


def matmul_flops_per_s(device: torch.device, size: int) -> float:
    """Rate of a square bf16 matrix product on random data."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2.0 * size**3 / seconds(device, lambda: a @ b)
