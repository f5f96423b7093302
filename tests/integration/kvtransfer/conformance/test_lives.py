"""The peer, a process of its own, is killed or stopped in every state of a transfer; a network that goes silent."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tandem.core.ids import BlockId, GroupId
from tandem.kvtransfer.events import Failed, Quiesced, SendCompleted, SendFailed, Verified
from tools.ticket_json import as_json

G0 = GroupId(0)
BLOCKS = 512  # 16 MiB: 16 frames of the largest size
FIRST, MIDDLE, NEVER = 0, 4, -1


def options(rig: Any, **more: Any) -> dict[str, Any]:
    return {"spec": asdict(rig.DENSE), "num_blocks": BLOCKS, "seed": 0} | more


def until(peer: Any, *events: str) -> dict[str, Any]:
    """The peer's next word of these kinds."""
    while (said := peer.read())["event"] not in events:
        pass
    return dict(said)


def outcomes(side: Any) -> Iterator[Any]:
    while not side.events.empty():
        yield side.events.get()


def sending_peer(rig: Any, halts_at: int, command: str) -> tuple[Any, Any, Any, Any]:
    """(peer, target, receiver, ticket): a peer that has come so far with its push."""
    target = rig.side(num_blocks=BLOCKS)
    receiver = rig.receiver(target)
    peer = rig.peer("sender", **options(rig, seed=6, halts_at=halts_at))
    ticket = rig.ticket(receiver.endpoints(), {0: range(BLOCKS)})
    receiver.expect(ticket)
    peer.command(command, ticket=as_json(ticket))
    if halts_at != NEVER:
        until(peer, "halted")
    elif command == "open":
        until(peer, "opened")
    else:
        assert isinstance(target.event(), Verified)
    return peer, target, receiver, ticket


@pytest.mark.parametrize(("halts_at", "command"), [(FIRST, "push"), (MIDDLE, "push"), (NEVER, "push_without_finish")])
def test_a_sender_killed_in_any_state(rig: Any, halts_at: int, command: str) -> None:
    peer, target, receiver, ticket = sending_peer(rig, halts_at, command)
    peer.process.kill()
    peer.process.wait()
    if halts_at == NEVER:  # all was here before it died: verified stays verified
        receiver.admit(ticket.transfer)
        assert receiver.counters()["open"] == 0
        return
    failed = target.event()
    assert isinstance(failed, Failed)
    image = target.image()
    receiver.cancel(ticket.transfer)
    assert target.image() == image
    assert receiver.counters()["open"] == 0
    assert target.events.empty()


@pytest.mark.parametrize("halts_at", [FIRST, MIDDLE])
def test_a_sender_stopped_in_the_middle_lands_nothing_after_the_cancel(rig: Any, halts_at: int) -> None:
    peer, target, receiver, ticket = sending_peer(rig, halts_at, "push")
    peer.process.send_signal(signal.SIGSTOP)
    try:
        receiver.cancel(ticket.transfer)
        image = target.image()
        assert not any(isinstance(outcome, Verified) for outcome in outcomes(target))
    finally:
        peer.process.send_signal(signal.SIGCONT)
    peer.command("go")
    assert until(peer, "SendFailed")["transfer"] == ticket.transfer
    assert target.image() == image
    assert receiver.counters()["open"] == 0


def pushing(rig: Any, halts_at: int) -> tuple[Any, Any, Any, Any]:
    """(peer, source, sender, ticket): a receiving peer that halts in its copy of that number, and a push to it."""
    peer = rig.peer("receiver", **options(rig, halts_at=halts_at))
    source = rig.side(num_blocks=BLOCKS, seed=9)
    sender = rig.sender(source)
    ticket = rig.ticket(peer.endpoints(), {0: range(BLOCKS)})
    peer.command("expect", ticket=as_json(ticket))
    until(peer, "expected")
    if halts_at == NEVER:
        return peer, source, sender, ticket
    push(sender, ticket)
    until(peer, "halted")
    return peer, source, sender, ticket


def push(sender: Any, ticket: Any) -> None:
    sender.open(ticket)
    blocks = tuple(map(BlockId, range(BLOCKS)))
    sender.push(ticket.transfer, G0, blocks, blocks, range(4))
    sender.finish(ticket.transfer)


@pytest.mark.parametrize("halts_at", [NEVER, FIRST, MIDDLE])
def test_a_receiver_killed_in_any_state(rig: Any, halts_at: int) -> None:
    peer, source, sender, ticket = pushing(rig, halts_at)
    peer.process.kill()
    peer.process.wait()
    if halts_at == NEVER:
        push(sender, ticket)
    assert isinstance(source.event(), SendFailed)
    assert sender.links() == ()
    assert source.events.empty()


@pytest.mark.parametrize("halts_at", [FIRST, MIDDLE])
def test_a_receiver_stopped_in_the_middle_of_a_copy_lets_the_sender_go_at_once(rig: Any, halts_at: int) -> None:
    peer, source, sender, ticket = pushing(rig, halts_at)
    peer.process.send_signal(signal.SIGSTOP)
    try:
        sender.cancel(ticket.transfer)
        outcome = source.event()
        assert isinstance(outcome, Quiesced | SendFailed)
        read = source.pools[G0].bytes_read
        assert not any(isinstance(late, SendCompleted) for late in outcomes(source))
    finally:
        peer.process.send_signal(signal.SIGCONT)
    peer.command("go")
    # what was under way may have been all of it: then that end has verified what this one no longer wants
    assert until(peer, "Failed", "Verified")["transfer"] == ticket.transfer
    assert source.pools[G0].bytes_read == read
    assert source.events.empty()


@pytest.mark.parametrize("state", ["idle", "pushing"])
def test_a_network_that_goes_silent_is_noticed_by_both_ends(rig: Any, state: str) -> None:
    if rig.transport not in ("tcp", "grpc"):
        pytest.skip("this transport does not leave its host alone")
    unshare = shutil.which("unshare")
    if (
        unshare is None
        or shutil.which("ip") is None
        or subprocess.run([unshare, "-rn", "true"], check=False).returncode
    ):
        pytest.skip("no network namespaces for this user")
    script = Path(__file__).parent.parent / "silent_cut.py"
    path = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        [unshare, "-rn", sys.executable, str(script), rig.transport, state, str(rig.runtime_dir)],
        env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=rig.patience_s / 2, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"sender": "SendFailed", "receiver": "Failed"}
