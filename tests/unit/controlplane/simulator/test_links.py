"""Wires: one way out and one way in a worker, transfers that begin while their bytes come into being."""

from __future__ import annotations

import pytest

from tandem.controlplane.simulator.links import Wires
from tandem.core.ids import WorkerId

P0, P1, D0, D1 = (WorkerId(name) for name in ("p0", "p1", "d0", "d1"))


def test_what_one_worker_sends_goes_one_after_the_other() -> None:
    wires = Wires(100.0)
    assert wires.send(P0, D0, 200, from_s=1.0, last_s=1.0) == pytest.approx(3.0)
    assert wires.send(P0, D1, 100, from_s=1.0, last_s=1.0) == pytest.approx(4.0)
    assert wires.send(P1, D1, 100, from_s=1.0, last_s=1.0) == pytest.approx(3.0)  # behind the other, coming in
    assert wires.send(P1, D0, 100, from_s=9.0, last_s=9.0) == pytest.approx(10.0)
    assert wires.sent_bytes == {(P0, D0): 200, (P0, D1): 100, (P1, D1): 100, (P1, D0): 100}


def test_a_fast_link_waits_for_the_last_part_alone() -> None:
    assert Wires(1000.0).send(P0, D0, 400, from_s=0.0, last_s=8.0, parts=4) == pytest.approx(8.1)
    assert Wires(10.0).send(P0, D0, 400, from_s=0.0, last_s=8.0, parts=4) == pytest.approx(40.0)
