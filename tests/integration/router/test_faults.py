"""Behaviour of the router when clients leave, and when workers die, stall, refuse or send nonsense."""

import concurrent.futures
import json
import socket

import httpx
import pytest

from tandem.core.config import Disaggregation
from tests.integration.router.house import Build, ask
from tests.integration.router.scripted_worker import Script
from tools.waiting import wait_for


def events(answer: httpx.Response) -> list[str]:
    return [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]


def text_of(answer: httpx.Response) -> str:
    chunks = [json.loads(event) for event in events(answer) if event != "[DONE]"]
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("stall_at", [0, 5])
def test_client_gone_cancels_both_workers(build: Build, is_stream: bool, stall_at: int) -> None:
    house = build()
    house.wait_ready()
    prefill, decode = house.workers["prefill-0"], house.workers["decode-0"]
    prefill.script = decode.script = Script(stall_at=stall_at)
    body = json.dumps({"model": "tiny", "prompt": "Hello", "max_tokens": 50, "stream": is_stream}).encode()
    with socket.create_connection(("127.0.0.1", house.ports["http"])) as raw:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
        raw.sendall(head.encode() + body)
        house.wait(lambda: len(decode.submitted) == 1 and len(prefill.submitted) == 1)
        house.wait(lambda: stall_at == 0 or house.router.dispatcher.flights[0].output_tokens == stall_at)
    request = decode.submitted[0].request
    house.wait(lambda: any(cancel.request == request for cancel in decode.cancels))
    if stall_at == 0:
        house.wait(lambda: any(cancel.request == request for cancel in prefill.cancels))
    house.wait(lambda: not house.router.dispatcher.flights and not decode.running)
    assert all(not link.requests and not len(link.outstanding) for link in house.router.table.links)
    wait_for(lambda: house.metric('tandem_requests_total{api="completions",outcome="cancelled"}') == 1)
    assert house.metric('tandem_requests_total{api="completions",outcome="ok"}') == 0


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_worker_dies_before_the_first_token(build: Build, victim: str) -> None:
    house = build(mode=Disaggregation.ALWAYS, worker_wait_s=0.0)
    house.wait_ready()
    for worker in house.workers.values():
        worker.script = Script(prefill_s=30)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        answers = [pool.submit(ask, house, stream=is_stream) for is_stream in (True, False)]
        house.wait(lambda: len(house.workers["prefill-0"].submitted) == 2)
        house.kill_worker(victim)
        for waiting in answers:
            answer = waiting.result(60)
            assert answer.status_code == 502
            assert answer.json()["error"]["code"] == "worker_lost"
            assert victim in answer.json()["error"]["message"]
            assert answer.headers["retry-after"] == "1"
            assert answer.headers["retry-after-ms"] == "1000"
    house.wait(lambda: not house.router.dispatcher.flights)


def test_worker_dies_mid_stream_and_comes_back(build: Build) -> None:
    house = build(worker_wait_s=0.0)
    house.wait_ready()
    house.workers["decode-0"].script = Script(stall_at=4)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = pool.submit(ask, house, stream=True)
        house.wait(lambda: bool(house.workers["decode-0"].submitted))
        house.wait(lambda: house.router.dispatcher.flights[0].output_tokens == 4)
        house.kill_worker("decode-0")
        answer = waiting.result(60)
    last = json.loads(events(answer)[-1])
    assert last["error"]["code"] == "worker_lost"
    assert "[DONE]" not in answer.text
    assert ask(house).status_code == 503
    assert httpx.get(f"{house.url}/readyz").status_code == 503
    house.workers["decode-0"].script = Script()
    house.restart_worker("decode-0")
    house.wait_ready()
    assert ask(house).status_code == 200


def test_silent_worker_is_lost_within_a_lease(build: Build) -> None:
    house = build(worker_wait_s=0.0)
    house.wait_ready()
    house.workers["decode-0"].script = Script(is_mute=True)
    answer = ask(house)  # which waits longer than a lease, but not much
    assert answer.status_code == 502


def test_prefill_worker_may_die_once_the_answer_is_handed_over(build: Build) -> None:
    house = build()
    house.wait_ready()
    house.workers["decode-0"].script = Script(step_s=0.05)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = pool.submit(ask, house, max_tokens=30)
        house.wait(lambda: bool(house.router.dispatcher.flights))
        house.wait(lambda: house.router.dispatcher.flights[0].output_tokens > 3)
        house.kill_worker("prefill-0")
        assert waiting.result(60).status_code == 200


def test_other_attempts_and_duplicates_never_reach_a_client(build: Build) -> None:
    house = build()
    house.wait_ready()
    clean = ask(house, n=2, max_tokens=20).json()
    for worker in house.workers.values():
        worker.script = Script(duplicates=True, other_attempts=True)
    assert ask(house, n=2, max_tokens=20).json()["choices"] == clean["choices"]
    assert text_of(ask(house, max_tokens=20, stream=True)) == clean["choices"][0]["text"]
    assert house.metric('tandem_router_dropped_chunks_total{reason="attempt"}') >= 40
    assert house.metric('tandem_router_dropped_chunks_total{reason="duplicate"}') > 0


def test_refusal_of_one_worker_cancels_the_other(build: Build) -> None:
    house = build(max_attempts=1)
    house.wait_ready()
    house.workers["prefill-0"].script = Script(refuse=("overloaded", "the queue is full"))
    answer = ask(house)
    assert answer.status_code == 503
    assert answer.json()["error"] == {
        "message": "the queue is full.", "type": "server_error", "param": None, "code": "overloaded",
    }  # fmt: skip
    assert answer.headers["retry-after"] == "1"
    decode = house.workers["decode-0"]
    house.wait(lambda: [cancel.request for cancel in decode.cancels][-1:] == [decode.submitted[-1].request])


def test_deadline(build: Build) -> None:
    house = build(request_timeout_s=0.5)
    house.wait_ready()
    house.workers["decode-0"].script = Script(stall_at=3)
    answer = ask(house)
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    streamed = ask(house, stream=True)
    assert json.loads(events(streamed)[-1])["error"]["code"] == "deadline_exceeded"
    house.wait(lambda: not house.router.dispatcher.flights and not house.workers["decode-0"].running)


def test_slow_reader_is_cancelled(build: Build) -> None:
    house = build(slow_reader_backlog_bytes=100_000, max_body_bytes=1 << 20)
    house.wait_ready()
    decode = house.workers["decode-0"]
    decode.script = Script(step_s=0.0)
    body = json.dumps(
        {"model": "tiny", "prompt": "Hi", "max_tokens": 3500, "n": 16, "stream": True, "logprobs": 20}
    ).encode()
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect(("127.0.0.1", house.ports["http"]))
        raw.sendall(
            f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
        )
        house.wait(lambda: bool(decode.cancelled), 60)
        house.wait(lambda: not house.router.dispatcher.flights)
    house.wait_ready()
    decode.script = Script()
    assert ask(house).status_code == 200


def test_stop_string_across_chunks_cancels(build: Build) -> None:
    house = build()
    house.wait_ready()
    whole = ask(house, max_tokens=200).json()["choices"][0]["text"]
    stop = whole[25:31]
    at = whole.find(stop)
    decode = house.workers["decode-0"]
    for is_stream in (False, True):
        decode.cancels.clear()
        answer = ask(house, max_tokens=2000, stop=[stop, "never this"], stream=is_stream)
        shown = text_of(answer) if is_stream else answer.json()["choices"][0]["text"]
        assert shown == whole[:at]
        if not is_stream:
            assert answer.json()["choices"][0]["finish_reason"] == "stop"
            assert answer.json()["usage"]["completion_tokens"] < 200
        house.wait(lambda: len(decode.cancels) == 1 and not decode.running)


def test_unauthenticated_router_is_refused(build: Build) -> None:
    house = build(start=False)
    from tandem.core.secret import ClusterSecret

    house.workers["decode-0"].secret = ClusterSecret.generate()
    house.start()
    house.wait(lambda: "UNAUTHENTICATED" in house.router.table.link("decode-0").trouble)  # type: ignore[arg-type,union-attr]
    missing = httpx.get(f"{house.url}/readyz").json()["missing"]
    assert any("cluster secret is missing or wrong" in line for line in missing)
    answer = ask(house)
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"


def test_incompatible_pair_is_never_planned(build: Build) -> None:
    house = build(start=False)
    house.workers["decode-0"].fingerprint = "0" * 32
    house.start()
    house.wait(lambda: len(house.router.table.usable()) == 2)
    status = house.status()
    assert status["refused_pairs"][0]["why"].startswith("revision differs")
    assert not status["is_ready"]
    answer = ask(house)
    assert answer.status_code == 503
    message = answer.json()["error"]["message"]
    assert "no prefill and decode worker fit together: prefill-0 and decode-0: revision differs" in message
    missing = httpx.get(f"{house.url}/readyz").json()["missing"]
    assert any(line.startswith("prefill-0 + decode-0: revision differs") for line in missing)
    assert status["pairs"] == []


def test_mixed_and_never(build: Build) -> None:
    mixed = build(prefill=0, decode=0, mixed=1)
    mixed.wait_ready()
    assert ask(mixed).status_code == 200
    assert mixed.workers["mixed-0"].submitted[0].leg == 1
    alone = build(mode=Disaggregation.NEVER)
    alone.wait_ready()
    assert ask(alone).status_code == 200
    assert not alone.workers["prefill-0"].submits


def test_work_spreads_over_workers(build: Build) -> None:
    house = build(prefill=2, decode=3)
    house.wait_ready()
    for worker in house.workers.values():
        worker.script = Script(step_s=0.01, is_held=True)  # however slowly clients start, they all are there at once
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        answers = [pool.submit(ask, house, max_tokens=20) for _ in range(12)]
        house.wait(lambda: len(house.router.dispatcher.flights) == 12)
        for worker in house.workers.values():
            worker.script.is_held = False
        assert [answer.result().status_code for answer in answers] == [200] * 12
    assert {name: len(worker.submitted) for name, worker in house.workers.items()} == {
        "prefill-0": 6, "prefill-1": 6, "decode-0": 4, "decode-1": 4, "decode-2": 4,
    }  # fmt: skip


def test_stopping_router_finishes_streams(build: Build) -> None:
    house = build()
    house.wait_ready()
    script = house.workers["decode-0"].script = Script(step_s=0.05)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = pool.submit(ask, house, max_tokens=400, stream=True)
        house.wait(lambda: bool(house.router.dispatcher.flights))
        house.loop.call_soon_threadsafe(house.router.stop)
        house.wait(lambda: house.router.readiness.is_draining)
        assert httpx.get(f"{house.url}/readyz").json()["missing"] == ["the router is stopping"]
        assert ask(house).status_code == 503
        script.step_s = 0.0
        assert events(waiting.result(60))[-1] == "[DONE]"
