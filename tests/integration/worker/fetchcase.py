"""One fetch among four simulated workers, and a gate that keeps it between two of its frames for as long as needed."""

import threading
from collections.abc import Iterator

import pytest

from tandem.core import metric_names as names
from tandem.core.ids import GroupId
from tandem.core.lease_timing import LEASE_S
from tandem.kvtransfer.jobs import Control, FrameWriter, Push
from tandem.kvtransfer.leases import SAY_EVERY_S
from tandem.kvtransfer.transports.base import Link
from tests.integration.worker.loopback import Rank
from tests.integration.worker.trio import BLOCK_BYTES, Trio

PROMPT = [(7 * i * i + 31 * i) % 4000 + 10 for i in range(600)]
HELD = 592
"""Tokens of the prompt in full blocks: what d0 holds from the start."""
GATE_LIMIT_S = 30.0
POLL_S = 0.001


def fetch(trio: Trio, *sources: str) -> None:
    """Send the prompt's request to d1, with d0, or `sources`, named as holders of its blocks."""
    trio.submit("r", PROMPT, "d1", sources=[(name, HELD) for name in sources or ("d0",)])


def reasons(trio: Trio, name: str = "d1") -> set[str]:
    """Why fetches of this worker failed."""
    prefix = f"{names.FETCHES_FAILED}{{reason="
    return {key[len(prefix) : -1] for key in trio[name].context.counters if key.startswith(prefix)}


def ends_well(trio: Trio) -> None:
    """The request is answered, though maybe computed, and no holder is left."""
    trio.run_until_rest()
    trio.check("r", PROMPT)


def lease_passes(trio: Trio) -> None:
    """Long enough for everything that one end forgot to be forgotten at the other."""
    for _ in range(8):
        trio.clock.skip((SAY_EVERY_S + LEASE_S) / 4)
        trio.turn(4)


class FrameGate:
    """The holder's first frame leaves; what comes after it waits until the gate opens or its transfer has ended.

    The wait is between two frames, where no lock is held: what ends a transfer need not wait for it.
    """

    def __init__(self, holder: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
        self._open = threading.Event()
        pool, write = holder.pools[GroupId(0)], FrameWriter.write

        def gated(writer: FrameWriter, link: Link, job: Push | Control) -> Iterator[None]:
            for _ in write(writer, link, job):
                if isinstance(job, Push) and job.pool is pool:
                    self._hold_back(job)
                yield

        monkeypatch.setattr(FrameWriter, "write", gated)

    def open(self) -> None:
        self._open.set()

    def _hold_back(self, job: Push) -> None:
        for _ in range(int(GATE_LIMIT_S / POLL_S)):
            if not job.outgoing.can_move_bytes or self._open.wait(POLL_S):
                return
        raise AssertionError(f"the gate stayed closed for {GATE_LIMIT_S:g} s")


def fetch_mid_copy(trio: Trio, monkeypatch: pytest.MonkeyPatch, *sources: str) -> FrameGate:
    """Begin the fetch, and stop it when d1 has some bytes of the holder's and not all, until the gate opens."""
    gate, receiver = FrameGate(trio["d0"], monkeypatch), trio["d1"].context.receiver
    fetch(trio, *sources)
    trio.run_until(lambda: any(one.bytes > 0 for one in receiver.transfers()))
    (landed,) = [one.bytes for one in receiver.transfers()]
    assert 0 < landed < HELD // 16 * BLOCK_BYTES
    return gate
