"""Links follow the registry and trust only the incarnation that it names."""

import concurrent.futures
from collections.abc import Sequence

import httpx
import pytest

from tandem.core.ids import WorkerId, new_incarnation
from tandem.core.version import STREAM_VERSION
from tandem.router.workers.connection import WorkerLink
from tandem.router.workers.proto_convert import TokenChunk
from tests.integration.router.house import Build, RouterHarness, ask
from tests.integration.router.scripted_worker import Script
from tools.waiting import wait_for

D = WorkerId("decode-0")


def link_of(house: RouterHarness) -> WorkerLink:
    link = house.router.table.link(D)
    assert link is not None
    return link


def test_another_incarnation_at_the_address_is_refused(build: Build) -> None:
    house = build(worker_wait_s=0.0)
    house.wait_ready()
    house.call(house.workers["decode-0"].restart())
    house.wait(lambda: "answers at this address" in link_of(house).trouble)
    assert any("answers at this address" in line for line in httpx.get(f"{house.url}/readyz").json()["missing"])
    assert [row["state"] for row in house.status()["workers"]] == ["unreachable", "ready"], "not what it once said"
    assert ask(house).status_code == 503
    house.loop.call_soon_threadsafe(house.directory.changed)
    house.wait_ready()
    assert ask(house).status_code == 200


def test_a_worker_of_another_release_is_refused_with_the_reason_until_it_is_updated(build: Build) -> None:
    house = build(worker_wait_s=0.0)
    house.wait_ready()
    worker = house.workers["decode-0"]
    worker.protocol = STREAM_VERSION + 1
    house.call(worker.restart())
    house.loop.call_soon_threadsafe(house.directory.changed)
    house.wait(lambda: f"version {STREAM_VERSION + 1} there, {STREAM_VERSION} here" in link_of(house).trouble)
    assert ask(house).status_code == 503
    assert worker.submitted == []
    worker.protocol = STREAM_VERSION
    house.call(worker.restart())
    house.loop.call_soon_threadsafe(house.directory.changed)
    house.wait_ready()
    assert ask(house).status_code == 200


def test_an_error_in_what_a_worker_said_costs_its_stream_alone(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    house = build(prefill=1, decode=2)
    house.wait_ready()
    dispatcher = house.router.dispatcher
    broken: list[str] = []
    on_tokens = dispatcher.on_tokens

    def hear(link: WorkerLink, chunks: Sequence[TokenChunk]) -> None:
        if not broken and link.worker.startswith("decode"):
            broken.append(link.worker)
            raise RuntimeError("a bug")
        on_tokens(link, chunks)

    monkeypatch.setattr(dispatcher, "on_tokens", hear)
    answer = ask(house)
    assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 8)
    (worker,) = broken
    others = [name for name in house.workers if name != worker]
    assert [house.workers[name].streams for name in others] == [1, 1]
    house.wait(lambda: house.workers[worker].streams == 2)
    house.wait_ready()


def test_new_incarnation_in_the_registry_gets_the_requests_of_the_old_one(build: Build) -> None:
    house = build()
    house.wait_ready()
    worker = house.workers["decode-0"]
    worker.script = Script(stall_at=3)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = pool.submit(ask, house)
        house.wait(lambda: any(flight.output_tokens == 3 for flight in house.router.dispatcher.flights))

        async def renew() -> None:
            # As after a lapse: the process is the same, its word counts for nothing until the new hello.
            worker.incarnation = new_incarnation()
            worker.script = Script()
            house.directory.changed()

        house.call(renew())
        answer = waiting.result(60)
    assert answer.status_code == 200
    assert [submit.attempt for submit in worker.submitted] == [1, 2]
    house.wait_ready()
    assert ask(house).status_code == 200
    assert worker.streams >= 2


def test_worker_that_left_finishes_its_requests_and_gets_no_new_ones(build: Build) -> None:
    house = build(prefill=1, decode=2)
    house.wait_ready()
    for name in ("decode-0", "decode-1"):
        house.workers[name].script = Script(step_s=0.05)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = [pool.submit(ask, house, max_tokens=20) for _ in range(2)]
        house.wait(lambda: all(house.workers[name].submitted for name in ("decode-0", "decode-1")))

        async def leave() -> None:
            del house.directory.workers[D]
            house.directory.changed()

        house.call(leave())
        house.wait(lambda: not link_of(house).is_registered)
        before = len(house.workers["decode-0"].submitted)
        assert ask(house).status_code == 200
        assert ask(house).status_code == 200
        assert len(house.workers["decode-0"].submitted) == before
        assert [answer.result(60).status_code for answer in waiting] == [200, 200]
    house.kill_worker("decode-0")
    house.wait(lambda: house.router.table.link(D) is None)
    assert httpx.get(f"{house.url}/readyz").status_code == 200


def test_load_reports_reach_status_and_metrics(build: Build) -> None:
    from tandem.core.metric_names import counter_key
    from tandem.rpc.v1 import worker_pb2 as w

    house = build()
    house.wait_ready()
    blocks = w.GroupBlocksCount(group=0, total=512, free=500, cached=4, request=8)
    key = counter_key("tandem_kv_transfer_bytes_total", direction="received")
    counters = {key: 4096.0, "handovers": 2, "kv_sent_bytes": 5, "transfer_dropped_checksum": 6, "transfer_open": 7}
    house.workers["decode-0"].load = w.LoadReport(in_flight=3, queued_tokens=77, blocks=[blocks], counters=counters)
    house.wait(lambda: link_of(house).load.in_flight == 3)
    worker = next(entry for entry in house.status()["workers"] if entry["worker"] == "decode-0")
    assert worker["blocks"][0]["free"] == 500
    labels = 'role="decode",worker="decode-0"'
    assert house.metric(f'tandem_kv_transfer_bytes_total{{direction="received",{labels}}}') == 4096
    assert house.metric(f'tandem_kv_transfer_bytes_total{{direction="sent",{labels}}}') == 5
    assert house.metric(f"tandem_handovers_total{{{labels}}}") == 2
    assert house.metric(f'tandem_kv_frames_dropped_total{{reason="checksum",{labels}}}') == 6
    assert house.metric(f"tandem_kv_receiving_transfers{{{labels}}}") == 7
    assert house.metric('tandem_kv_blocks{group="0",role="decode",state="request",worker="decode-0"}') == 8
    assert house.metric('tandem_worker_in_flight_requests{role="decode",worker="decode-0"}') == 3


def test_pairs_are_named_in_order(build: Build) -> None:
    """However their links came up."""
    house = build(prefill=2, decode=2)
    house.wait_ready()
    house.wait(lambda: len(house.router.table.usable()) == 4)
    named = [(pair["prefill"], pair["decode"]) for pair in house.status()["pairs"]]
    assert named == [(f"prefill-{p}", f"decode-{d}") for p in range(2) for d in range(2)]


def test_burst_with_cancels_leaves_nothing_behind(build: Build) -> None:
    house = build()
    house.wait_ready()
    for worker in house.workers.values():
        worker.script = Script(step_s=0.002)

    def one(number: int) -> bool:
        body = {"model": "tiny", "prompt": f"Hello {number}", "max_tokens": 5 + number % 40, "stream": True}
        with httpx.Client(timeout=30) as client, client.stream("POST", f"{house.url}/v1/completions", json=body) as got:
            for count, line in enumerate(got.iter_lines()):
                if number % 5 == 0 and count > number % 9:
                    return False
                if line == "data: [DONE]":
                    return True
        raise AssertionError("the stream ended without an end")

    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        ends = list(pool.map(one, range(100)))
    assert ends.count(True) >= 80
    house.wait(lambda: not house.router.dispatcher.flights)
    house.wait(lambda: not any(worker.running for worker in house.workers.values()))
    assert all(not link.requests and not len(link.outstanding) for link in house.router.table.links)
    wait_for(lambda: house.metric('tandem_requests_total{api="completions"') == 100)
