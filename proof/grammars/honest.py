"""The honest client of the proof: streams answers without a pause, and writes the gaps between their tokens.

A process of its own: threads that send large requests would hold the interpreter for milliseconds, and their waits be
taken for the cluster's. A line on its input begins answers, and the next ends them after the one that runs.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import httpx

from bench.report import ROOT

HONEST_TOKENS = 300
TIMEOUT_S = 60.0
_ENDED = "the honest client ended: its standard error has the reason"


class HonestClient:
    """The process, and what it measures while other work runs."""

    def __init__(self, api: str) -> None:
        command = [sys.executable, "-m", "proof.grammars.honest", api]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def close(self) -> None:
        """End the process, and its connections with it."""
        with self._process as process:  # which closes its pipes and waits
            process.kill()

    def during(self, work: Callable[[], Any]) -> list[float]:
        """Gaps, in seconds, of the answers while `work` runs, which may raise: of one answer at least."""
        self._say("begin")
        work()
        self._say("end")
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise AssertionError(_ENDED)
        return [float(gap) for gap in json.loads(line)]

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise AssertionError(_ENDED) from None


def _answer(http: httpx.Client) -> Iterator[float]:
    """Gaps between the tokens of one answer, in seconds."""
    body = {
        "model": "tandem-tiny", "prompt": "An honest client streams", "max_tokens": HONEST_TOKENS, "temperature": 0,
        "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    with http.stream("POST", "/v1/completions", json=body) as response:
        events = [(time.monotonic(), line) for line in response.iter_lines() if line.startswith("data: {")]
    last = json.loads(events[-1][1].removeprefix("data: ")) if events else {}
    if (last.get("usage") or {}).get("completion_tokens") != HONEST_TOKENS:
        raise AssertionError(f"an honest stream ended with status {response.status_code} and {last}")
    yield from (after - before for (before, _), (after, _) in pairwise(events))


def main() -> None:
    # Without a buffer, in which a line would wait unseen by select.
    with open(0, "rb", buffering=0) as lines, httpx.Client(base_url=sys.argv[1], timeout=TIMEOUT_S) as http:
        while lines.readline():
            gaps = list(_answer(http))
            while not select.select([lines], [], [], 0)[0]:
                gaps += _answer(http)
            lines.readline()
            print(json.dumps(gaps), flush=True)


if __name__ == "__main__":
    main()
