"""The sending worker's process: start it, send it commands, read its messages, end it."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any


class SendingProcess:
    """`sender_process` from outside. `said`: its messages, in order. `tell` may be called from any thread."""

    def __init__(self, log: Path) -> None:
        self._log = log.open("ab")
        self._telling = threading.Lock()
        self._child = subprocess.Popen(
            [sys.executable, "-m", "proof.transfer.sender_process"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self.said: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="from sender", daemon=True)
        self._reader.start()
        self.expect("ready")

    def tell(self, do: str, **fields: Any) -> None:
        assert self._child.stdin is not None
        with self._telling:
            self._child.stdin.write(json.dumps({"do": do, **fields}) + "\n")
            self._child.stdin.flush()

    def expect(self, kind: str) -> dict[str, Any]:
        """The next message of that kind; events before it are kept in `said`."""
        kept = []
        try:
            while (message := self.said.get(timeout=60))["is"] != kind:
                if message["is"] == "ended":
                    raise RuntimeError("the sending process ended; see its log")
                kept.append(message)
            return message
        finally:
            for other in kept:
                self.said.put(other)

    def close(self) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        try:
            self._child.wait(20)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._reader.join(10)
        assert self._child.stdout is not None
        self._child.stdout.close()
        self._log.close()

    def _read(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            self.said.put(json.loads(line))
        self.said.put({"is": "ended"})
