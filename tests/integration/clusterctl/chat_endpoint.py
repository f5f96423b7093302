"""An OpenAI endpoint that says what a test wants, and a way to run `clusterctl chat` without a terminal."""

import io
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tandem.clusterctl import main as program

Run = Callable[..., tuple[int, str, str]]


@dataclass
class Endpoint:
    """An OpenAI endpoint that sends `pieces` and keeps its requests; b"" drops the connection. After them it sends
    nothing while `is_free` is not set."""

    url: str = ""
    pieces: list[bytes] = field(default_factory=list)
    asked: list[dict[str, Any]] = field(default_factory=list)
    is_free: threading.Event = field(default_factory=threading.Event)

    def messages(self) -> list[tuple[str, str]]:
        return [(one["role"], one["content"]) for one in self.asked[-1]["messages"]]


@contextmanager
def serving(pieces: list[bytes]) -> Iterator[Endpoint]:
    """An endpoint that answers with these pieces, until others are set."""
    found = Endpoint(pieces=pieces)
    found.is_free.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            found.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            if b"" in found.pieces:
                self.send_header("Content-Length", str(10 + sum(map(len, found.pieces))))
            self.end_headers()
            for piece in found.pieces:
                self.wfile.write(piece)
                self.wfile.flush()
            found.is_free.wait(60)

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        found.url = f"http://127.0.0.1:{server.server_port}/v1"
        yield found
        server.shutdown()
        thread.join()


def chat_runner(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """A function that returns exit code, stdout and stderr of a chat; `typed` is what the standard input holds, which
    is no terminal."""

    def chat(*arguments: str, typed: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed)))
        code = program.run(["chat", *arguments])
        return code, *capsys.readouterr()

    return chat
