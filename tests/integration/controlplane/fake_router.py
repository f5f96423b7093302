"""Behaves like a router towards `up` and `clusterctl`: ready file, /readyz, and the two admin calls."""

import argparse
import asyncio
import dataclasses
import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tandem.core import config_loader
from tandem.core.config import RouterConfig
from tandem.core.files import write_private
from tandem.statestore.connection import connect
from tandem.statestore.keys import Keys
from tandem.statestore.stores.desired import DesiredStateStore


class Handler(BaseHTTPRequestHandler):
    config: RouterConfig
    key: str
    ready_status = 200

    def log_message(self, *arguments: object) -> None:
        return

    def do_GET(self) -> None:
        if self.path == "/readyz":
            self._answer(self.ready_status, {})
        elif self._is_allowed():
            workers = [{"worker": "prefill-0", "role": "prefill", "ready": True}]
            self._answer(200, {"cluster": self.config.cluster, "workers": workers})

    def do_POST(self) -> None:
        if self._is_allowed():
            asyncio.run(self._down())
            self._answer(202, {})

    async def _down(self) -> None:
        redis = await connect(self.config.redis_url)
        store = DesiredStateStore(redis, Keys(self.config.cluster))
        state = await store.load()
        assert state is not None
        stopped = dataclasses.replace(state, version=state.version + 1, is_stopped=True)
        await store.save(stopped, state.version)
        await redis.aclose()

    def _is_allowed(self) -> bool:
        if self.headers.get("Authorization") == f"Bearer {self.key}":
            return True
        self._answer(401, {"error": {"code": "invalid_api_key", "message": "wrong admin key"}})
        return False

    def _answer(self, status: int, body: dict[str, object]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True, type=Path)
    parser.add_argument("--refuse", default="", help="print this and end with code 2")
    parser.add_argument("--unready", action="store_true")
    options = parser.parse_args()
    if options.refuse:
        print(options.refuse, file=sys.stderr)
        return 2
    Handler.config = config_loader.load(options.config, RouterConfig)
    Handler.key = Path(Handler.config.admin_key_file).read_text()
    Handler.ready_status = 503 if options.unready else 200
    server = ThreadingHTTPServer(("127.0.0.1", Handler.config.settings.port), Handler)
    url = f"http://127.0.0.1:{server.server_port}"
    addresses = {"http": url, "grpc": "127.0.0.1:1", "admin": url, "pid": os.getpid(), "is_open": True}
    write_private(Path(Handler.config.ready_file), json.dumps(addresses).encode())
    server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
