"""Time a decode step of one request with SmolLM2: in the kernels' C code, and everything between its calls."""

from __future__ import annotations

import statistics
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

from bench.models import smollm2
from bench.report import Row
from tandem.core.block_hash import BlockHash
from tandem.core.clock import MonotonicClock
from tandem.core.sampling import SamplingParams
from tandem.engine.engine import Engine
from tandem.engine.request import EngineRequest
from tandem.engine.runner import ModelRunner
from tandem.kernels.cpu_library import CpuLibrary

FORMATS = {"bf16": "none", "int8": "int8", "int4": "int4"}
PROMPT, ANSWER = 128, 300
LIMIT = 5.0
"""Percent of a step that Python, locks and wake-ups may take."""


class Computing:
    """Seconds in calls of the kernels' C code, and how many there were."""

    def __init__(self) -> None:
        self.seconds, self.calls = 0.0, 0

    def take(self) -> tuple[float, int]:
        """Return both, and begin again."""
        found, self.seconds, self.calls = (self.seconds, self.calls), 0.0, 0
        return found


@contextmanager
def timed_calls() -> Iterator[Computing]:
    """Time every call of the kernels' libraries, of any thread."""
    computing, plain = Computing(), CpuLibrary.call_with

    def call_with(library: CpuLibrary, given: array[int], number: float = 0.0) -> int:
        started_s = time.perf_counter()
        answer = plain(library, given, number)
        computing.seconds += time.perf_counter() - started_s
        computing.calls += 1
        return answer

    with patch.object(CpuLibrary, "call_with", call_with):
        yield computing


def steps(name: str, threads: int) -> list[Row]:
    """Medians over the steps of one greedy answer; torch's operations count as between, since they are small ones."""
    runner = ModelRunner(
        model_dir=smollm2(),
        dtype="bfloat16",
        quantize=FORMATS[name],
        block_tokens=16,
        max_model_len=1024,
        num_blocks=64,
    )
    engine = Engine(runner, clock=MonotonicClock())
    sampling = SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True)
    prompt = tuple(range(300, 300 + PROMPT))
    engine.add(EngineRequest(key="one", prompt=prompt, sampling=sampling, hash_root=BlockHash(bytes(16))))
    whole, inside, calls = [], [], []
    with timed_calls() as computing:
        while engine.has_work:
            computing.take()
            started_s = time.perf_counter()
            result = engine.step()
            whole.append(time.perf_counter() - started_s)
            seconds, count = computing.take()
            inside.append(seconds)
            calls.append(count)
            if result.prefill_tokens:
                whole, inside, calls = [], [], []
    case = f"a step of one request, {name}, {threads} threads"
    between = statistics.median(100 * (1 - some / step) for some, step in zip(inside, whole, strict=True))
    return [
        Row(case, "step", 1e3 * statistics.median(whole), "ms"),
        Row(case, "in the kernels' C code", 1e3 * statistics.median(inside), "ms", 1e3 * statistics.median(whole)),
        Row(case, "calls of it", statistics.median(calls), ""),
        Row(case, "between them", between, "%", LIMIT),
    ]


def every_format() -> list[Row]:
    """Rows of each format with one and with two threads, which torch has afterwards."""
    rows: list[Row] = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for name in FORMATS:
            rows += steps(name, threads)
    return rows
