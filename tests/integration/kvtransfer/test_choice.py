"""How a sender picks its transport, and what it says about it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.core.errors import ConfigError
from tandem.core.ids import BlockId, GroupId
from tandem.kvtransfer.events import SendFailed, Sent

BOTH = ("shm", "grpc")


def transfer(rig: Any, sender: Any, receiver: Any, source: Any, endpoints: Any) -> Any:
    """Move 8 blocks; the sender's event."""
    ticket = rig.ticket(endpoints)
    receiver.expect(ticket)
    sender.open(ticket)
    blocks = tuple(BlockId(b) for b in range(8))
    sender.push(ticket.transfer, GroupId(0), blocks, blocks, range(4))
    sender.finish(ticket.transfer)
    return source.event()


def test_shared_memory_is_taken_on_the_same_host(any_rig: Any) -> None:
    source, target = any_rig.side(seed=1), any_rig.side()
    receiver, sender = any_rig.receiver(target, transports=BOTH), any_rig.sender(source, preference="auto")
    assert isinstance(transfer(any_rig, sender, receiver, source, receiver.endpoints()), Sent)
    (link,) = sender.links()
    assert (link.transport, link.reason, link.worker, link.rank) == ("shm", "same host", "d0", 0)


def test_grpc_is_taken_from_another_host(any_rig: Any) -> None:
    source, target = any_rig.side(seed=1), any_rig.side()
    receiver, sender = any_rig.receiver(target, transports=BOTH), any_rig.sender(source, preference="auto")
    elsewhere = [replace(e, host="another:1") for e in receiver.endpoints()]
    assert isinstance(transfer(any_rig, sender, receiver, source, elsewhere), Sent)
    (link,) = sender.links()
    assert (link.transport, link.reason) == ("grpc", "another host")


def test_grpc_is_the_fallback_where_the_socket_cannot_be_reached(
    any_rig: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, target = any_rig.side(seed=1), any_rig.side()
    receiver, sender = any_rig.receiver(target, transports=BOTH), any_rig.sender(source, preference="auto")
    missing = str(tmp_path / "in-another-container.sock")
    endpoints = [replace(e, address=missing) if e.transport == "shm" else e for e in receiver.endpoints()]
    assert isinstance(transfer(any_rig, sender, receiver, source, endpoints), Sent)
    (link,) = sender.links()
    assert link.transport == "grpc"
    assert "shm failed" in link.reason
    assert "transfer_dial_failed" in caplog.text


def test_no_usable_transport_is_a_failure_with_a_reason(any_rig: Any) -> None:
    source, target = any_rig.side(seed=1), any_rig.side()
    receiver, sender = any_rig.receiver(target, transports=("grpc",)), any_rig.sender(source, preference="shm")
    event = transfer(any_rig, sender, receiver, source, receiver.endpoints())
    assert isinstance(event, SendFailed)
    assert "no transport" in event.reason


def test_a_long_runtime_directory_gets_an_abstract_socket(any_rig: Any, tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    source, target = any_rig.side(seed=1), any_rig.side()
    receiver, sender = any_rig.receiver(target, runtime_dir=deep), any_rig.sender(source)
    assert receiver.endpoints()[0].address.startswith("@tandem-")
    assert isinstance(transfer(any_rig, sender, receiver, source, receiver.endpoints()), Sent)


def test_a_socket_file_is_private_and_goes_with_its_receiver(any_rig: Any) -> None:
    receiver = any_rig.receiver(any_rig.side())
    path = Path(receiver.endpoints()[0].address)
    assert path.stat().st_mode & 0o777 == 0o600
    receiver.close()
    assert not path.exists()


def test_an_unknown_transport_is_a_configuration_error(any_rig: Any) -> None:
    with pytest.raises(ConfigError, match="pigeon"):
        any_rig.receiver(any_rig.side(), transports=("pigeon",))
