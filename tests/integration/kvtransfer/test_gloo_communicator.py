"""Guarantees of gloo's communicators: order, an end to every wait and to every rendezvous, nothing left behind."""

import os
import subprocess
import sys

import psutil
import pytest
import torch.distributed
from torch._C._distributed_c10d import HashStore

from tandem.kvtransfer.transports import gloo_communicator
from tandem.kvtransfer.transports.base import LinkClosedError
from tandem.kvtransfer.transports.control_socket import ControlSocket
from tandem.kvtransfer.transports.gloo_communicator import RECEIVER_RANK, GlooCommunicator
from tests.integration.kvtransfer.gloo_pair import SIZE, Pair, connected, outcome_of
from tools.waiting import wait_for

NEVER_S = 3600.0


def test_payloads_arrive_in_order_where_they_belong(pair: Pair) -> None:
    sizes = [1, 7, 1 << 20, 4096, 3 << 20]
    content = [os.urandom(size) for size in sizes]
    for number, data in enumerate(content):
        offset = number * 100
        pair.sender.staging[offset : offset + len(data)] = data
        arriving = pair.receiver.receive(offset, len(data))
        leaving = pair.sender.send(offset, len(data))
        arriving.wait()
        leaving.wait()
        assert pair.receiver.staging[offset : offset + len(data)] == data


@pytest.mark.parametrize("end", ["sender", "receiver"])
def test_an_abort_ends_every_wait_at_once(pair: Pair, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo_communicator, "PAYLOAD_TIMEOUT_S", NEVER_S)
    here: GlooCommunicator = getattr(pair, end)
    begin = here.send if end == "sender" else here.receive
    told = [outcome_of(begin(number << 20, 1 << 20)) for number in range(3)]
    here.abort()
    assert all(one.get(timeout=30) for one in told)
    here.abort()
    with pytest.raises(LinkClosedError):
        begin(0, 10).wait()


LEAVING = """
import atexit, queue, sys
from tests.integration.kvtransfer.gloo_pair import Pair, outcome_of

waiting = queue.SimpleQueue()
atexit.register(lambda: sys.stdout.write(waiting.get().get(timeout=50)))  # the first to register is called last
pair = Pair()
waiting.put(outcome_of(pair.receiver.receive(0, 10)))
"""


def test_a_process_that_ends_waits_for_the_threads_that_it_has_in_gloo() -> None:
    path = os.pathsep.join(part for part in sys.path if part)
    ended = subprocess.run(
        [sys.executable, "-c", LEAVING], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout


def test_after_an_abort_no_late_payload_is_written(pair: Pair) -> None:
    told = outcome_of(pair.receiver.receive(0, SIZE))
    pair.receiver.abort()
    assert told.get(timeout=30)
    before = bytes(pair.receiver.staging)
    pair.sender.staging[:] = b"\x55" * SIZE
    with pytest.raises(LinkClosedError):
        pair.sender.send(0, SIZE).wait()
    assert bytes(pair.receiver.staging) == before


@pytest.mark.parametrize("first", ["sender", "receiver"])
def test_an_abort_in_the_middle_of_a_payload_stops_its_bytes(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo_communicator, "PAYLOAD_TIMEOUT_S", 1.0)
    pair = Pair(64 << 20)
    pair.sender.staging[:] = b"\x55" * len(pair.sender.staging)
    told = [outcome_of(pair.receiver.receive(0, 64 << 20)), outcome_of(pair.sender.send(0, 64 << 20))]
    here, there = (pair.sender, pair.receiver) if first == "sender" else (pair.receiver, pair.sender)
    here.abort()
    there.abort()
    before = bytes(pair.receiver.staging)
    outcomes = [one.get(timeout=30) for one in told]
    assert bytes(pair.receiver.staging) == before
    assert (outcomes[0] == "") <= (before == bytes(pair.sender.staging))  # a report that all has come is right
    pair.close()


def test_a_wait_has_an_end(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo_communicator, "PAYLOAD_TIMEOUT_S", 0.05)
    with pytest.raises(LinkClosedError, match="Timed out"):
        pair.receiver.receive(0, 10).wait()


def test_forty_at_once_beside_a_default_group_and_all_is_given_back() -> None:
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        process = psutil.Process(os.getpid())
        Pair().close()
        before = process.num_fds(), process.num_threads()
        pairs = [Pair() for _ in range(40)]
        for made in pairs:
            arriving = made.receiver.receive(0, 1 << 16)
            made.sender.send(0, 1 << 16).wait()
            arriving.wait()
            del arriving  # a work keeps its group's sockets open
        assert process.num_fds() <= before[0] + 40 * 2 * 6
        assert process.num_threads() <= before[1] + 40 * 2 * 2
        for made in pairs:
            made.close()
        for _ in range(100):
            Pair().close()
        wait_for(lambda: (process.num_fds(), process.num_threads()) <= before)
        assert torch.distributed.get_world_size() == 1
    finally:
        torch.distributed.destroy_process_group()


def test_a_rendezvous_that_breaks_off_is_reported_at_once() -> None:
    here, there = connected()
    control = ControlSocket(here)
    there.sendall(b"\x08\0\0\0\x05\0no va")  # one byte short of the declared length
    there.close()
    with pytest.raises(LinkClosedError, match="broke off the rendezvous"):
        GlooCommunicator(control, RECEIVER_RANK, SIZE)
    control.release()


def test_a_rendezvous_that_says_ever_more_is_ended() -> None:
    here, there = connected()
    control = ControlSocket(here)
    there.sendall(b"".join(b"\x06\0\0\0\x04\0k%03d" % number for number in range(65)))
    with pytest.raises(LinkClosedError, match="more than 64 messages"):
        GlooCommunicator(control, RECEIVER_RANK, SIZE)
    control.release()
    there.close()
