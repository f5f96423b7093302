"""Test clocks, backoff, phases of a start and the factor of timeouts."""

import json
import os
import subprocess
import sys
import time

import pytest

from tandem.core.backoff import RestartBackoff
from tandem.core.clock import ManualClock, MonotonicClock
from tandem.core.errors import ConfigError
from tandem.core.start_times import StartPhase, StartTimes, process_started_s
from tandem.core.timeout_scale import PATIENCE_VARIABLE, named_patience


def test_it_goes_on_while_the_machine_is_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = {time.CLOCK_MONOTONIC: 60.0, time.CLOCK_BOOTTIME: 3660.0}
    monkeypatch.setattr(time, "clock_gettime", clocks.__getitem__)
    assert MonotonicClock().now_s() == 3660.0


def test_delays_grow_while_it_keeps_dying_however_well_each_start_went() -> None:
    clock = ManualClock()
    backoff = RestartBackoff(clock)
    delays_s = []
    for _ in range(7):
        backoff.ready()
        clock.advance(29.9)
        delays_s.append(backoff.died())
    assert delays_s == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


def test_they_begin_again_once_it_ran_well() -> None:
    clock = ManualClock()
    backoff = RestartBackoff(clock)
    assert [backoff.died(), backoff.died()] == [0.5, 1.0]
    backoff.ready()
    clock.advance(30.0)
    assert backoff.died() == 0.5
    clock.advance(60.0)
    assert backoff.died() == 1.0, "it was not ready in between"


PROGRAM = """
import time
time.sleep({pause})
from tandem.core.clock import MonotonicClock
from tandem.core.start_times import process_started_s
clock = MonotonicClock()
print(clock.now_s() - process_started_s(clock))
"""


def test_phases_add_up_from_the_start_of_the_process() -> None:
    clock = ManualClock(100.0)
    times = StartTimes(StartPhase.IMPORTS, clock, began_s=99.25)
    times.enter(StartPhase.CONFIG)
    clock.advance(0.002)
    times.enter(StartPhase.WEIGHTS)
    clock.advance(2.0)
    times.enter(StartPhase.WARM_UP)
    clock.advance(0.5)
    times.enter(StartPhase.WEIGHTS)  # once more
    clock.advance(1.0)
    assert times.fields() == {"took_s": 4.252, "imports_s": 0.75, "config_s": 0.002, "weights_s": 3.0, "warm_up_s": 0.5}
    assert times.words() == "started in 4.25 s: loading the model 3.00 s, importing Tandem 0.75 s, warming up 0.50 s"


def test_every_phase_is_told_by_words_that_nobody_else_says() -> None:
    assert len(set(StartPhase)) == len(StartPhase.__members__)


@pytest.mark.slow
def test_a_process_knows_when_it_was_started() -> None:
    """Not only since when its code runs."""
    began_s = time.monotonic()
    program = [sys.executable, "-c", PROGRAM.format(pause=0.3)]
    said_s = float(subprocess.run(program, capture_output=True, text=True, check=True, env=os.environ).stdout)
    assert 0.3 <= said_s <= time.monotonic() - began_s + 0.02  # it is reported in hundredths


def test_this_process_began_before_now() -> None:
    clock = MonotonicClock()
    assert 0.0 < clock.now_s() - process_started_s(clock) < 3600.0


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
    "workerhost.watchdog.LOADING_LOOKS": 480,
    "workerhost.watchdog.SILENT_LOOKS": 10,
    "workerhost.stream_protocol.HELLO_TIMEOUT_S": 5.0,
    "workerhost.stream_protocol.IDLE_TIMEOUT_S": 10.0,
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
    with pytest.raises(ConfigError, match=r"TANDEM_PATIENCE is .*: it multiplies .*\. Use a number from 1 to 3600"):
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
