"""Processes of the benchmark: started here, driven by JSON lines over stdin and stdout, ended by their own pid."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from bench.report import ROOT

PATIENCE_S = 120.0
Handler = Callable[..., dict[str, Any]]


class Child:
    """`python -m MODULE OPTIONS`, behind `prefix` (`taskset`, `ip netns exec`). Answers every command with one line."""

    def __init__(self, module: str, *, prefix: Sequence[str] = (), environment: dict[str, str] | None = None,
                 **options: Any) -> None:  # fmt: skip
        path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
        self.name = f"{module} {options.get('role', '')}"
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-m", module, json.dumps(options)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT,
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | (environment or {}),
        )  # fmt: skip

    def call(self, command: str, **fields: Any) -> dict[str, Any]:
        """Do one thing and wait for its answer."""
        self.begin(command, **fields)
        return self.answer()

    def begin(self, command: str, **fields: Any) -> None:
        """Send a command without waiting; `answer` takes the result."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"command": command} | fields).encode() + b"\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Raises RuntimeError if the process ended or is silent for PATIENCE_S."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], PATIENCE_S)
        line = self._process.stdout.readline() if ready else b""
        if not line:
            raise RuntimeError(f"{self.name} {'ended' if ready else 'is silent'}")
        decoded: dict[str, Any] = json.loads(line)
        if "error" in decoded:
            raise RuntimeError(f"{self.name}: {decoded['error']}")
        return decoded

    def close(self) -> None:
        """End it: close its input, then end the process if it does not follow."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def serve(handlers: dict[str, Handler], commands: Iterable[str] = sys.stdin) -> None:
    """The child's side: run each command's handler with its fields, answer with what it returns."""
    for line in commands:
        fields = json.loads(line)
        try:
            answer = handlers[fields.pop("command")](**fields)
        except Exception as error:  # noqa: BLE001 - sent to the parent, which ends the run
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)
