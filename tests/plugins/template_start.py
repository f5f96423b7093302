"""Requests to a template process: one message a start, and one answer.

The message: 4 bytes of length, with the descriptors as SCM_RIGHTS, then a `Start` as JSON. The answer: 4 bytes, the id
of the new process.
"""

import dataclasses
import json
import socket
import struct
from dataclasses import dataclass

LENGTH = struct.Struct("!I")
MAX_DESCRIPTORS = 250


@dataclass(frozen=True, slots=True)
class Start:
    """A process to start, `python -m MODULE …`.

    `descriptors`: the number that each passed one gets. `tied`: (signal, parent) of `parentdeath`. `group` and `umask`:
    -1 means that of the template. `limits`: by number of the resource, soft and hard.
    """

    arguments: list[str]
    environment: dict[str, str]
    folder: str
    descriptors: list[int]
    tied: tuple[int, int] | None
    new_session: bool
    group: int
    umask: int
    ignored: list[int]
    blocked: list[int]
    limits: dict[int, tuple[int, int]]
    cores: list[int]


def send(connection: socket.socket, start: Start, descriptors: list[int]) -> int:
    """Have a process started; returns its id. OSError or EOFError if the template is gone."""
    data = json.dumps(dataclasses.asdict(start)).encode()
    socket.send_fds(connection, [LENGTH.pack(len(data))], descriptors)
    connection.sendall(data)
    return int(LENGTH.unpack(_exactly(connection, LENGTH.size))[0])


def receive(connection: socket.socket) -> tuple[Start, list[int]]:
    """The next start, and the descriptors passed with it. EOFError when the owner is gone."""
    head, passed, _, _ = socket.recv_fds(connection, LENGTH.size, MAX_DESCRIPTORS)
    if len(head) < LENGTH.size:
        raise EOFError("the owner is gone")
    return Start(**json.loads(_exactly(connection, LENGTH.unpack(head)[0]))), passed


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        if not (part := connection.recv(size - len(data))):
            raise EOFError("the other end is gone")
        data += part
    return bytes(data)
