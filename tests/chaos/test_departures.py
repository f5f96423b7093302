"""CI's slice of `make proof NAME=departures`: clients of a real cluster leave at random moments, nothing is left."""

import random
from pathlib import Path

from tests.chaos.departures import simulated, wave


def test_clients_that_leave_at_any_moment(tmp_path: Path) -> None:
    rng = random.Random(4)
    with simulated(tmp_path) as cluster:
        waves = [wave(cluster, rng) for _ in range(5)]
    assert len({phase for one in waves for phase in one.phases}) >= 3, "they leave in different phases"
