"""A test router in a process of its own that measures the cost of bodies: `costs_program REDIS_URL FOLDER`.

On standard input come requests, each a line `PATH BYTES` and a body of so many bytes. For each of them a line of JSON
goes to standard output: the status, the longest turn in seconds and the growth in bytes.
"""

import json
import socket
import sys
from pathlib import Path

from tandem.core.config import StoreSection
from tandem.core.memory import return_large_buffers
from tests.integration.router.house import RouterHarness, builder
from tests.plugins.costs import measured


def main() -> None:
    redis_url, folder = sys.argv[1], Path(sys.argv[2])
    return_large_buffers()
    store = StoreSection(dir=str(folder / "files"), max_file_bytes=1_000_000, max_batch_requests=200)
    with builder(folder) as make:
        house = make(redis_url=redis_url, store=store)
        house.wait_ready()
        while line := sys.stdin.buffer.readline():
            path, size = line.decode().split()
            body = sys.stdin.buffer.read(int(size))
            with measured(house.loop) as cost:
                status = post(house, path, body)
            said = {"status": status, "longest_turn_s": cost.longest_turn_s, "grown_bytes": cost.grown_bytes}
            print(json.dumps(said), flush=True)


def post(house: RouterHarness, path: str, body: bytes) -> int:
    """The status; by a plain socket, which costs this process next to nothing."""
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    )
    with socket.create_connection(("127.0.0.1", house.ports["http"]), timeout=60) as client:
        client.sendall(head.encode() + b"connection: close\r\n\r\n")
        client.sendall(body)
        answer = b""
        while part := client.recv(65536):
            answer += part
    return int(answer.split(b" ", 2)[1])


if __name__ == "__main__":
    main()
