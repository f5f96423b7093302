"""Faults that only a shared ring has to withstand."""

import os
import socket
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.core.ids import Rank, TransferId, WorkerId
from tandem.kvtransfer.frame import FrameKind, encode
from tandem.kvtransfer.transports import unix_socket
from tandem.kvtransfer.transports.base import LinkClosedError, Peer
from tests.integration.kvtransfer.rig import Rig
from tests.unit.kvtransfer.conftest import control


def test_a_position_that_no_ring_reaches_is_malformed(tmp_path: Path) -> None:
    """The bytes freed behind it would be a number that no reply can carry."""
    rig = Rig("shm", tmp_path)
    try:
        receiver = rig.receiver(rig.side())
        raw = rig.dial(receiver.endpoints()[0])
        size = 4096
        crc = zlib.crc32(bytes(size))
        frame = control(kind=FrameKind.PROBE, transfer=TransferId(0), payload_bytes=size, payload_crc=crc)
        link: Any = raw.link
        link._socket.send(((1 << 64) - size).to_bytes(8, "little") + encode(frame))
        with pytest.raises(LinkClosedError, match="malformed frame: position"):
            raw.last_words()
        assert receiver.counters()["dropped_malformed"] == 1
    finally:
        rig.close()


@pytest.mark.parametrize("transport", ["shm", "cpu_ipc"])
def test_at_an_abstract_name_this_user_alone_is_let_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    rig = Rig(transport, folder)
    try:
        receiver = rig.receiver(rig.side())
        (endpoint,) = receiver.endpoints()
        assert endpoint.address.startswith("@")
        assert list(folder.iterdir()) == []
        assert rig.dial(endpoint).told() == []
        monkeypatch.setattr(unix_socket, "_user_of", lambda _: os.geteuid() + 1)
        with pytest.raises(LinkClosedError, match="no challenge"):
            rig.dial(endpoint)
    finally:
        rig.close()


def test_a_sender_that_reads_nothing_cannot_keep_a_link_that_is_closed_on_it(
    tmp_path: Path, fill: Callable[[socket.socket], None]
) -> None:
    """The reason of its link's end cannot be sent to it."""
    rig = Rig("shm", tmp_path)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener: Any = rig.receiver(rig.side())._listeners[0]
        peer = Peer(worker=WorkerId("p0"), incarnation=rig.SENDER, rank=Rank(0), host="h")
        fill(theirs)
        no_ring: Any = None
        arguments = (theirs, listener._intake.connect(peer), no_ring)
        serving = threading.Thread(target=listener._serve, args=arguments, daemon=True)
        serving.start()
        ours.send(bytes(100))
        serving.join(rig.patience_s)
        assert not serving.is_alive()
    finally:
        theirs.close()
        ours.close()
        rig.close()
