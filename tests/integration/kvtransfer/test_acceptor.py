"""A listener outlives a time in which its process has no descriptors left."""

from __future__ import annotations

import logging
import os
import resource
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.kvtransfer.transports.acceptor import Acceptor
from tests.integration.kvtransfer.rig import Rig


def test_connections_are_taken_again_once_there_are_descriptors(
    tmp_path: Path, wait_until: Callable[[Callable[[], bool]], None], caplog: pytest.LogCaptureFixture
) -> None:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(str(tmp_path / "sock"))

    def serve(connection: socket.socket) -> None:
        connection.send(b"welcome")

    def failures() -> list[Any]:
        return [record for record in caplog.records if record.message.startswith("transfer_accept_failed")]

    acceptor = Acceptor(listening, serve, transport="test", limit=4)
    acceptor.start()
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client, caplog.at_level(logging.WARNING):
        client.settimeout(30)
        lowest_free = os.dup(client.fileno())
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, usual[1]))
        try:
            client.connect(str(tmp_path / "sock"))
            wait_until(lambda: bool(failures()))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, usual)
        assert client.recv(100) == b"welcome"
    acceptor.close()


def test_a_receiver_that_cannot_start_leaves_nothing_listening(tmp_path: Path) -> None:
    rig = Rig("shm", tmp_path)
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="assign"):
        rig.receiver(rig.side(), transports=("shm", "tcp"), bind_host="203.0.113.1")
    assert list(tmp_path.iterdir()) == []
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == (threads, descriptors)
