"""Processes that run cases of the wire part and of the matrix side by side; one that hangs is named and ended."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

CASE_WITHIN_S = 180.0
Result = dict[str, Any]


def run_cases(
    part: str, seed: int, indices: Sequence[int], jobs: int, is_stopping: Callable[[], bool]
) -> Iterator[Result]:
    """Results as they come, until all are there or `is_stopping`."""
    waiting = iter(indices)
    lock = threading.Lock()
    results: queue.SimpleQueue[Result | None] = queue.SimpleQueue()

    def next_index() -> int | None:
        with lock:
            return None if is_stopping() else next(waiting, None)

    threads = [
        threading.Thread(target=_work, args=(part, seed, next_index, results), name=f"cases {number}", daemon=True)
        for number in range(min(jobs, len(indices)))
    ]
    for thread in threads:
        thread.start()
    running = len(threads)
    while running:
        result = results.get()
        if result is None:
            running -= 1
        else:
            yield result
    for thread in threads:
        thread.join()


def _work(
    part: str, seed: int, next_index: Callable[[], int | None], results: queue.SimpleQueue[Result | None]
) -> None:
    process: subprocess.Popen[str] | None = None
    try:
        while (index := next_index()) is not None:
            process = process or _start()
            result = _one(process, {"part": part, "seed": seed, "index": index})
            if result is None:
                process.kill()
                process.wait()
                process = None
                words = f"{part}/{index}: its process ended, or was not done after {CASE_WITHIN_S:g} s"
                result = {"index": index, "transport": "?", "violations": [words], "transfers": 0, "admitted": 0}
                result |= {"bytes": 0, "hits": {}, "figures": [], "held": []}
            results.put(result)
    finally:
        if process is not None:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.close()
            process.wait(30)
            process.stdout.close()
        results.put(None)


def _start() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "proof.transfer.wire_worker"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def _one(process: subprocess.Popen[str], job: dict[str, Any]) -> Result | None:
    """The result of one case; None if its process ended or hangs."""
    assert process.stdin is not None
    assert process.stdout is not None
    watchdog = threading.Timer(CASE_WITHIN_S, process.kill)
    watchdog.start()
    try:
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
    except OSError:
        return None
    finally:
        watchdog.cancel()
    return json.loads(line) if line else None
