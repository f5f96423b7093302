"""Ports without a listener, and short temporary folders (unix sockets have short names)."""

import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tandem.workerhost import stream_protocol


@pytest.fixture(autouse=True)
def nobody_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams in this process are held without pings, for as long as a test may take."""
    monkeypatch.setattr(stream_protocol, "IDLE_TIMEOUT_S", 600.0)


@pytest.fixture
def unused_port() -> Callable[[], int]:
    def find() -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1])

    return find


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="td-") as name:
        yield Path(name)
