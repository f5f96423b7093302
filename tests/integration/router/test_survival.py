"""Failing worker × time × kind of request: with a spare worker of that role the client gets the undisturbed answer."""

import concurrent.futures
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from tandem.core.config import Disaggregation
from tandem.rpc.v1 import worker_pb2 as w
from tests.integration.router.house import Build, RouterHarness, ask, builder
from tests.integration.router.scripted_worker import Script, ScriptedWorker
from tests.integration.router.transcript import Transcript, read_stream, read_whole

COMPLETION: dict[str, Any] = {"prompt": "Hello there", "max_tokens": 24, "temperature": 0}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 24, "temperature": 0}
STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
ASKS: dict[str, dict[str, Any]] = {
    "whole": COMPLETION,
    "stream": COMPLETION | STREAM,
    "chat": CHAT | STREAM,
    "n=2": COMPLETION | STREAM | {"n": 2, "temperature": 0.7, "seed": 5},
    "logprobs": COMPLETION | STREAM | {"logprobs": 3},
    "chat logprobs": CHAT | STREAM | {"logprobs": True, "top_logprobs": 2},
    "penalties": COMPLETION | STREAM | {"frequency_penalty": 0.5, "presence_penalty": 0.5},
}


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterHarness]:
    """Two of each; every answer has to cross, so that only another worker of the role can help."""
    with builder(tmp_path_factory.mktemp("router")) as make:
        house = make(prefill=2, decode=2, mode=Disaggregation.ALWAYS, max_attempts=8)
        yield house


@pytest.fixture(autouse=True)
def _all_well(house: RouterHarness) -> Iterator[None]:
    _set(house, "", Script())
    for name in house.workers:
        link = house.router.table.link(house.workers[name].worker)
        if link is None or not link.is_up:
            house.restart_worker(name)
    house.wait(lambda: len(house.router.table.usable()) == 4)
    house.wait_ready()
    yield
    house.wait(lambda: not house.router.dispatcher.flights and not house.router.dispatcher.waiting)
    house.wait(lambda: all(not link.requests for link in house.router.table.links))  # the loop's thread ends both


def get(house: RouterHarness, body: dict[str, Any]) -> Transcript:
    path = "chat/completions" if "messages" in body else "completions"
    answer = httpx.post(f"{house.url}/v1/{path}", json={"model": "tiny", **body}, timeout=30)
    assert answer.status_code == 200, answer.text
    transcript = read_stream(answer.text) if body.get("stream") else read_whole(answer.json())
    assert transcript.is_well_formed, transcript
    assert transcript.dones == 1
    return transcript


def _set(house: RouterHarness, role: str, script: Script) -> None:
    for name, worker in house.workers.items():
        if name.startswith(role):
            worker.script = replace(script)


def _strike(
    house: RouterHarness, role: str, trouble: Script, body: dict[str, Any], is_due: Any, strike: Any
) -> Transcript:
    """Ask with `trouble` at all workers of `role`; once `is_due`, `strike` the one that has the request. The others,
    and that one for later requests, are well."""
    _set(house, role, trouble)
    able = [worker for name, worker in house.workers.items() if name.startswith(role)]
    before = {worker.worker: len(worker.submitted) for worker in able}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(get, house, body)
        house.wait(lambda: any(len(worker.submitted) > before[worker.worker] for worker in able))
        (victim,) = [worker for worker in able if len(worker.submitted) > before[worker.worker]]
        house.wait(is_due)
        _set(house, role, Script())
        strike(victim)
        return waiting.result(30)


def _tokens_so_far(house: RouterHarness) -> int:
    return max((flight.output_tokens for flight in house.router.dispatcher.flights), default=0)


@pytest.mark.drawn(9)
@pytest.mark.parametrize("kind", ASKS)
@pytest.mark.parametrize(
    ("role", "trouble", "tokens"),
    [
        ("prefill", Script(prefill_s=30), 0), ("decode", Script(stall_at=0), 1), ("decode", Script(stall_at=7), 7),
        ("decode", Script(stall_at=23), 23),
    ],
    ids=["prefill", "transfer", "mid-stream", "last token"],
)  # fmt: skip
def test_a_worker_dies(house: RouterHarness, kind: str, role: str, trouble: Script, tokens: int) -> None:
    body = ASKS[kind]
    undisturbed = get(house, body)
    again = house.metric('tandem_reattempts_total{cause="lost"}')
    struck = _strike(
        house, role, trouble, body,
        lambda: _tokens_so_far(house) >= tokens * body.get("n", 1), lambda victim: house.kill_worker(victim.worker),
    )  # fmt: skip
    assert struck == undisturbed
    assert house.metric('tandem_reattempts_total{cause="lost"}') == again + 1


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("transfer_failed", "transfer"), ("overloaded", "refused"), ("unavailable", "refused"),
        ("internal", "broken"), ("cancelled", "lost"),
    ],
)  # fmt: skip
def test_a_worker_refuses(house: RouterHarness, role: str, code: str, cause: str) -> None:
    """All of them at first, so that one of them has to get a second chance."""
    undisturbed = get(house, ASKS["n=2"])
    _set(house, role, Script(refuse=(code, "not today")))
    able = [worker for name, worker in house.workers.items() if name.startswith(role)]
    again = house.metric(f'tandem_reattempts_total{{cause="{cause}"}}')
    before = sum(len(worker.submitted) for worker in able)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(get, house, ASKS["n=2"])
        house.wait(lambda: sum(len(worker.submitted) for worker in able) >= before + 2)
        _set(house, role, Script())
        assert waiting.result(30) == undisturbed
    assert house.metric(f'tandem_reattempts_total{{cause="{cause}"}}') >= again + 2


@pytest.mark.parametrize(("role", "stall_at"), [("prefill", 0), ("decode", 5)])
def test_a_worker_falls_silent(house: RouterHarness, role: str, stall_at: int) -> None:
    undisturbed = get(house, ASKS["stream"])
    trouble = Script(stall_at=stall_at)

    def mute(victim: ScriptedWorker) -> None:
        victim.script.is_mute = True

    def due() -> bool:
        return _tokens_so_far(house) >= stall_at

    assert _strike(house, role, trouble, ASKS["stream"], due, mute) == undisturbed


def test_a_stop_string_across_a_death(house: RouterHarness) -> None:
    """It begins in the first worker's output and ends in the second one's."""
    whole = get(house, COMPLETION | {"logprobs": 0}).choices[0]
    offsets = [entry[-1] for entry in whole.logprobs]
    at = next(n for n in range(4, 20) if offsets[n + 1] - offsets[n - 1] >= 2 and offsets[n] - offsets[n - 1] >= 1)
    stop = whole.text[offsets[at] - 1 : offsets[at] + 1]
    body = COMPLETION | STREAM | {"stop": [stop]}
    undisturbed = get(house, body)
    assert undisturbed.choices[0].finishes == ["stop"]
    reached = min(at, undisturbed.usages[0]["completion_tokens"] - 1)
    struck = _strike(
        house, "decode", Script(stall_at=reached), body,
        lambda: _tokens_so_far(house) >= reached, lambda victim: house.kill_worker(victim.worker),
    )  # fmt: skip
    assert struck == undisturbed


def test_one_after_the_other_dies(house: RouterHarness) -> None:
    """A decode worker, then the prefill worker of the next attempt, then another decode worker."""
    undisturbed = get(house, ASKS["n=2"])
    _set(house, "decode", Script(stall_at=4))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(get, house, ASKS["n=2"])
        house.wait(lambda: _tokens_so_far(house) == 8)
        _set(house, "prefill", Script(prefill_s=30))
        flight = house.router.dispatcher.flights[0]
        house.kill_worker(flight.plan.decode)
        prefill = [worker for name, worker in house.workers.items() if name.startswith("prefill")]
        house.wait(lambda: flight.attempt == 2 and len(flight.legs) == 2)
        # One of them has read its script when the request has reached it.
        house.wait(lambda: any((s.request, s.attempt) == (flight.id, 2) for each in prefill for s in each.submitted))
        _set(house, "prefill", Script())
        _set(house, "decode", Script(stall_at=9))
        assert flight.plan.prefill is not None
        house.kill_worker(flight.plan.prefill)
        house.wait(lambda: flight.attempt == 3 and flight.output_tokens == 18)
        house.restart_worker(
            next(name for name in house.workers if name.startswith("decode") and name not in flight.legs)
        )
        _set(house, "decode", Script())
        house.kill_worker(flight.plan.decode)
        assert waiting.result(30) == undisturbed


def test_several_prompts_in_one_answer(house: RouterHarness) -> None:
    body = COMPLETION | STREAM | {"prompt": ["Hello", "Good day", "Well"], "n": 2, "temperature": 1, "seed": 3}
    undisturbed = get(house, body)
    _set(house, "decode", Script(stall_at=6))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(get, house, body)
        house.wait(lambda: sum(flight.output_tokens for flight in house.router.dispatcher.flights) == 36)
        _set(house, "decode", Script())
        house.kill_worker("decode-0")
        house.kill_worker("decode-1")
        house.restart_worker("decode-1")
        assert waiting.result(30) == undisturbed
    assert len(undisturbed.choices) == 6


# ---- without a spare -------------------------------------------------------------------------------------------------


def test_the_only_worker_comes_back(build: Build) -> None:
    house = build()
    house.wait_ready()
    undisturbed = get(house, ASKS["n=2"])
    decode = house.workers["decode-0"]
    decode.script = Script(stall_at=4)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(get, house, ASKS["n=2"])
        house.wait(lambda: _tokens_so_far(house) == 8)
        decode.script = Script()
        house.kill_worker("decode-0")
        house.wait(lambda: house.router.dispatcher.waiting == 1)
        later = pool.submit(get, house, ASKS["whole"])
        house.wait(lambda: house.router.dispatcher.waiting == 2)
        assert house.metric("tandem_router_waiting_requests") == 2
        house.restart_worker("decode-0")
        assert waiting.result(30) == undisturbed
        assert later.result(30).is_well_formed


def test_without_a_prefill_worker_the_decode_worker_does_all(build: Build) -> None:
    house = build(mode=Disaggregation.AUTO)
    house.wait_ready()
    undisturbed = get(house, ASKS["n=2"])
    house.workers["prefill-0"].script = Script(refuse=("internal", "a bug"))
    assert get(house, ASKS["n=2"]) == undisturbed
    house.kill_worker("prefill-0")
    house.wait(lambda: len(house.router.table.usable()) == 1)
    assert get(house, ASKS["n=2"]) == undisturbed
    assert house.workers["decode-0"].submitted[-1].leg == w.LEG_FULL
    house.wait_ready()


def test_the_request_s_own_fault_is_tried_once(house: RouterHarness) -> None:
    _set(house, "decode", Script(refuse=("context_length_exceeded", "too long for all of us")))
    before = sum(len(worker.submitted) for worker in house.workers.values())
    answer = ask(house)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    # The answer may be there before the other leg has reached its worker.
    house.wait(lambda: sum(len(worker.submitted) for worker in house.workers.values()) >= before + 2)
    assert sum(len(worker.submitted) for worker in house.workers.values()) == before + 2


def test_a_storm_ends_with_the_budget(build: Build) -> None:
    house = build(prefill=1, decode=2, retry_burst=3, retry_ratio=0.0, retry_per_s=0.0, breaker_failures=0)
    house.wait_ready()
    _set(house, "decode", Script(refuse=("unavailable", "not today")))
    assert [ask(house).status_code for _ in range(5)] == [503] * 5
    assert house.metric("tandem_reattempts_total") == 3
    assert house.metric("tandem_retry_budget_tokens") == 0
    assert house.metric('tandem_reattempts_denied_total{reason="budget"}') >= 4


def test_a_breaker_keeps_requests_from_who_keeps_failing(build: Build) -> None:
    house = build(prefill=1, decode=2, breaker_failures=1, breaker_open_s=60.0)
    house.wait_ready()
    bad = house.workers["decode-0"]
    bad.script = Script(refuse=("internal", "a bug"))
    for _ in range(6):
        assert ask(house).status_code == 200
    assert len(bad.submitted) == 1
    assert house.metric('tandem_worker_breaker_state{worker="decode-0"}') == 2
    assert house.metric('tandem_worker_breaker_state{worker="decode-1"}') == 0
    states = {row["worker"]: row["breaker"] for row in house.status()["workers"]}
    assert states == {"prefill-0": "closed", "decode-0": "open", "decode-1": "closed"}
