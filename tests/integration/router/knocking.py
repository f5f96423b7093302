"""Clients that ask one small thing again and again, each over a connection of its own, until the port is closed."""

import socket
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from urllib.parse import urlsplit

PATIENCE_S = 30.0


class Knocking:
    """`statuses`: of whole answers; `broken`: connections that were made and ended without one; `refused`: clients that
    found the port closed, and stop trying."""

    def __init__(self, url: str) -> None:
        where = urlsplit(url)
        self._address = (str(where.hostname), where.port)
        self.statuses = Counter[int]()
        self.broken: list[str] = []
        self.refused = 0

    def knock(self) -> None:
        """Ask until the port is closed."""
        while not self.broken:
            try:
                connection = socket.create_connection(self._address, timeout=PATIENCE_S)
            except ConnectionRefusedError:
                self.refused += 1
                return
            with connection:
                try:
                    self._ask(connection)
                except OSError as error:
                    self.broken.append(repr(error))

    def _ask(self, connection: socket.socket) -> None:
        connection.sendall(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
        if answer.endswith(b"}"):
            self.statuses[int(answer.split()[1])] += 1
        else:
            self.broken.append(f"an answer of {len(answer)} bytes")


@contextmanager
def knocking(url: str, clients: int) -> Iterator[Knocking]:
    """Run so many clients; the end waits until all of them found the port closed."""
    knock = Knocking(url)
    with ThreadPoolExecutor(clients) as pool:
        ends = [pool.submit(knock.knock) for _ in range(clients)]
        yield knock
    for end in ends:
        end.result()
