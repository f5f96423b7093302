"""Clients that leave while their request waits for another attempt: there is none."""

from __future__ import annotations

import pytest

from tests.integration.router.house import Build
from tests.integration.router.leaving import WAYS, ask
from tests.integration.router.scripted_worker import Script
from tools.waiting import wait_for


@pytest.mark.parametrize("way", WAYS)
def test_a_client_that_leaves_between_attempts(build: Build, way: str) -> None:
    house = build()
    house.wait_ready()
    dispatcher, decode = house.router.dispatcher, house.workers["decode-0"]
    decode.script = Script(stall_at=3)
    http, rpc = (f"127.0.0.1:{house.ports[name]}" for name in ("http", "grpc"))
    leave = ask(http, rpc, way, "Hello", max_tokens=50)
    house.wait(lambda: [flight.output_tokens for flight in dispatcher.flights] == [3])
    house.kill_worker("decode-0")
    house.wait(lambda: dispatcher.waiting == 1)
    leave()
    house.wait(lambda: not dispatcher.flights)
    assert not dispatcher.waiting
    decode.script = Script()
    house.restart_worker("decode-0")
    house.wait_ready()
    assert len(decode.submitted) == 1
    assert all(not link.requests and not len(link.outstanding) for link in house.router.table.links)
    api = "grpc" if way == "grpc" else "completions"
    wait_for(lambda: house.metric(f'tandem_requests_total{{api="{api}",outcome="cancelled"}}') == 1)
