"""One rig a transport. The suite is in `conformance/`; every test of it that takes `rig` runs over each of NAMES."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tandem.kvtransfer.transports import tcp
from tests.integration.kvtransfer.rig import NAMES, Rig

if TYPE_CHECKING:
    from tests.integration.kvtransfer.gloo_pair import Pair


@pytest.fixture(autouse=True)
def two_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several sockets a tcp link, on any machine: frames may then come in another order than they were sent."""
    monkeypatch.setattr(tcp, "sockets_for", lambda cores: 2)


@pytest.fixture(params=NAMES)
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    made = Rig(request.param, tmp_path)
    yield made
    made.close()


@pytest.fixture
def any_rig(tmp_path: Path) -> Iterator[Rig]:
    """For tests that name their transports themselves."""
    made = Rig("shm", tmp_path)
    yield made
    made.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    from tests.integration.kvtransfer.gloo_pair import Pair  # torch, for those alone that take it

    made = Pair()
    yield made
    made.close()


@pytest.fixture
def fill() -> Callable[[socket.socket], None]:
    """Return a function that sends until nothing leaves any more: the reader at the other end has to begin first."""

    def send(connection: socket.socket) -> None:
        for timeout_s, size in ((0.2, 1 << 16), (0.0, 1)):  # the last gap, too
            connection.settimeout(timeout_s)
            with contextlib.suppress(TimeoutError, BlockingIOError):
                while True:
                    connection.send(bytes(size))
        connection.settimeout(None)

    return send
