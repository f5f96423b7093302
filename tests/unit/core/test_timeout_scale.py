"""One factor, out of the environment, for every bound on the silence of another process."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tandem.core.errors import ConfigError
from tandem.core.timeout_scale import PATIENCE_VARIABLE, named_patience

BOUNDS = {
    "core.lease_timing.LEASE_S": 2.5,
    "core.lease_timing.STAND_S": 10.0,
    "core.lease_timing.TOMBSTONE_S": 5.0,
    "controlplane.controller.START_TIMEOUT_S": 300.0,
    "controlplane.control_orders.SILENT_S": 5.0,
    "controlplane.router_process.READY_TIMEOUT_S": 60.0,
    "decode_worker.tickets.ANNOUNCEMENT_WAIT_S": 5.0,
    "kvtransfer.probed_connection.ANSWER_TIMEOUT_S": 3.0,
    "kvtransfer.transports.base.DIAL_TIMEOUT_S": 5.0,
    "kvtransfer.transports.grpc.LOST_AFTER_MS": 3000,
    "kvtransfer.transports.tcp_socket.LOST_AFTER_S": 2,
    "statestore.connection.SOCKET_TIMEOUT_S": 5.0,
    "statestore.index.publisher.INDEX_TTL_S": 10.0,
    "router.dispatch.readiness.PROBE_S": 20.0,
    "router.server.multiprocess.READY_S": 60.0,
    "router.workers.connection.HELLO_S": 2.0,
    "router.workers.connection.SILENCE_S": 10.0,
    "worker.rank.HOST_TIMEOUT_S": 10.0,
    "workerhost.rank_watch.LOADING_LOOKS": 480,
    "workerhost.rank_watch.SILENT_LOOKS": 10,
    "workerhost.streams.HELLO_TIMEOUT_S": 5.0,
    "workerhost.streams.IDLE_TIMEOUT_S": 10.0,
}
"""As they are without patience."""
TELL = """
import importlib, json, sys
def bound(place):
    module, _, name = place.rpartition(".")
    return getattr(importlib.import_module(f"tandem.{module}"), name)
print(json.dumps({place: bound(place) for place in sys.argv[1:]}))
"""


@pytest.mark.parametrize(("said", "factor"), [("", 1), ("1", 1), ("600", 600), ("2.5", 2.5), ("3600", 3600)])
def test_the_environment_names_it(said: str, factor: float) -> None:
    assert named_patience({PATIENCE_VARIABLE: said}) == factor
    assert named_patience({}) == 1


@pytest.mark.parametrize("said", ["0", "0.5", "-3", "3601", "nan", "inf", "long", "10s"])
def test_what_is_no_factor_is_refused(said: str) -> None:
    with pytest.raises(ConfigError, match=r"TANDEM_PATIENCE is .*: it says .*\. Use a number from 1 to 3600, or unset"):
        named_patience({PATIENCE_VARIABLE: said})


def bounds(patience: str) -> dict[str, float]:
    told = subprocess.run(
        [sys.executable, "-c", TELL, *BOUNDS], env={**os.environ, PATIENCE_VARIABLE: patience},
        check=True, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    return dict(json.loads(told.stdout))


@pytest.mark.slow
def test_it_reaches_every_bound() -> None:
    assert bounds("") == BOUNDS
    assert bounds("600") == {place: 600 * bound for place, bound in BOUNDS.items()}


@pytest.mark.slow
def test_a_process_with_a_wrong_one_does_not_start() -> None:
    command = [sys.executable, "-c", "import tandem.core.lease_timing"]
    ended = subprocess.run(
        command, env={**os.environ, PATIENCE_VARIABLE: "x"}, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode != 0
    assert "TANDEM_PATIENCE is 'x'" in ended.stderr.splitlines()[-1]
