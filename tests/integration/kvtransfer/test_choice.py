"""A sender's choice of transport, and its report of it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.core.errors import ConfigError, StartupError
from tandem.core.ids import BlockId, GroupId
from tandem.kvtransfer import receiver
from tandem.kvtransfer.events import SendCompleted, SendFailed
from tandem.kvtransfer.transports.base import UnavailableTransportError
from tandem.kvtransfer.transports.registry import TRANSPORTS

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
    assert isinstance(transfer(any_rig, sender, receiver, source, receiver.endpoints()), SendCompleted)
    (link,) = sender.links()
    assert (link.transport, link.reason, link.peer, link.peer_rank) == ("shm", "same host", "d0", 0)


def test_grpc_is_taken_from_another_host(any_rig: Any) -> None:
    source, target = any_rig.side(seed=1), any_rig.side()
    receiver, sender = any_rig.receiver(target, transports=BOTH), any_rig.sender(source, preference="auto")
    elsewhere = [replace(e, host="another:1") for e in receiver.endpoints()]
    assert isinstance(transfer(any_rig, sender, receiver, source, elsewhere), SendCompleted)
    (link,) = sender.links()
    assert (link.transport, link.reason) == ("grpc", "another host")


def test_grpc_is_the_fallback_where_the_socket_cannot_be_reached(
    any_rig: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, target = any_rig.side(seed=1), any_rig.side()
    receiver, sender = any_rig.receiver(target, transports=BOTH), any_rig.sender(source, preference="auto")
    missing = str(tmp_path / "in-another-container.sock")
    endpoints = [replace(e, address=missing) if e.transport == "shm" else e for e in receiver.endpoints()]
    assert isinstance(transfer(any_rig, sender, receiver, source, endpoints), SendCompleted)
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
    assert isinstance(transfer(any_rig, sender, receiver, source, receiver.endpoints()), SendCompleted)


def test_a_socket_file_is_private_and_goes_with_its_receiver(any_rig: Any) -> None:
    receiver = any_rig.receiver(any_rig.side())
    path = Path(receiver.endpoints()[0].address)
    assert path.stat().st_mode & 0o777 == 0o600
    receiver.close()
    assert not path.exists()


def test_an_unknown_transport_is_a_configuration_error(any_rig: Any) -> None:
    with pytest.raises(ConfigError, match="pigeon"):
        any_rig.receiver(any_rig.side(), transports=("pigeon",))


def unavailable(_: Any) -> Any:
    raise UnavailableTransportError("this machine lacks it")


@pytest.fixture
def broken_shm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which shared memory does not work."""
    broken = dict(TRANSPORTS) | {"shm": replace(TRANSPORTS["shm"], listen=unavailable)}
    monkeypatch.setattr(receiver, "TRANSPORTS", broken)
    monkeypatch.setattr(receiver, "find", broken.__getitem__)


@pytest.mark.usefixtures("broken_shm")
def test_a_transport_that_does_not_work_here_is_left_out_unless_it_is_named(
    any_rig: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    working = any_rig.receiver(any_rig.side(), transports=())
    assert {e.transport for e in working.endpoints()} == {
        t.name for t in TRANSPORTS.values() if t.suits(on_device=False)
    } - {"shm"}
    assert "transfer_transport_skipped" in caplog.text
    with pytest.raises(ConfigError, match="this machine lacks it"):
        any_rig.receiver(any_rig.side(), transports=("shm",))


def test_an_address_that_cannot_be_bound_is_an_error(any_rig: Any) -> None:
    with pytest.raises((StartupError, OSError)):
        any_rig.receiver(any_rig.side(), transports=("grpc",), bind_host="192.0.2.1")
    fallback = any_rig.receiver(any_rig.side(), transports=(), bind_host="192.0.2.1")
    assert {e.transport for e in fallback.endpoints()} == {"shm"}
