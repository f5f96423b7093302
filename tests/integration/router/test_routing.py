"""Routing as seen by operators and clients: explanations, the opt-in header, and another policy under load."""

import concurrent.futures
import json
from functools import partial
from typing import Any

import httpx
import pytest

from tandem.core.config import Disaggregation, PolicyName
from tandem.rpc.v1 import worker_pb2 as w
from tests.integration.router.house import ADMIN_KEY, Build, RouterHarness
from tests.integration.router.scripted_worker import Script

HEADERS = {"authorization": f"Bearer {ADMIN_KEY}"}


def admin(house: RouterHarness, path: str, body: object = None) -> tuple[int, dict[str, Any]]:
    url = f"{house.admin_url}/admin/v1/route/{path}"
    answer = httpx.get(url, headers=HEADERS) if body is None else httpx.post(url, headers=HEADERS, json=body)
    found: dict[str, Any] = answer.json()
    return answer.status_code, found


def complete(house: RouterHarness, headers: dict[str, str] | None = None, **more: Any) -> httpx.Response:
    body = {"model": "tiny", "prompt": "Hello there", "max_tokens": 4, "temperature": 0, **more}
    return httpx.post(f"{house.url}/v1/completions", json=body, headers=headers, timeout=60)


def _any_done(answers: list[concurrent.futures.Future[httpx.Response]]) -> bool:
    return not answers or any(answer.done() for answer in answers)


SCHEMA: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "integer"}}}


def test_what_an_answer_follows_is_explained_and_traced(build: Build) -> None:
    house = build(prefill=1, decode=1)
    house.wait_ready()
    constraint = {"kind": "schema", "param": "response_format.json_schema.schema"}
    for more, wanted in (({}, None), ({"response_format": SCHEMA}, constraint)):
        assert admin(house, "explain", {"prompt": "Hello", **more})[1]["constraint"] == wanted
        request = complete(house, **more).json()["id"]
        found = httpx.get(f"{house.admin_url}/admin/v1/requests/{request}", headers=HEADERS).json()
        assert found["constraint"] == wanted
    broken = {**SCHEMA, "json_schema": {"name": "a", "schema": {"type": "intger"}}}
    status, refused = admin(house, "explain", {"prompt": "Hello", "response_format": broken})
    assert (status, refused["error"]["param"]) == (400, "response_format.json_schema.schema.type")


def test_explain_says_what_would_be_done_and_does_nothing(build: Build) -> None:
    house = build(prefill=2, decode=1)
    house.wait_ready()
    busy = w.LoadReport(
        queued_tokens=9000, queued_requests=1, in_flight=1, prefill_rate=1000.0, queue_stretch=20.0,
        queue_max_overtake_s=30.0, queue=[w.QueuedWork(due_in_s=0.0, tokens=9000, requests=1)],
    )  # fmt: skip
    house.workers["prefill-0"].load = busy
    house.wait(lambda: any(link.load.queued_tokens for link in house.router.table.links))
    submitted = {name: len(worker.submits) for name, worker in house.workers.items()}
    status, found = admin(house, "explain", {"prompt": list(range(300, 400)), "max_tokens": 4})
    assert status == 200
    assert (found["policy"], found["prompt_tokens"], found["max_tokens"]) == ("cost", 100, 4)
    assert (found["prefill"], found["decode"], found["reason"]) == ("prefill-1", "decode-0", "a pair costs least")
    costs = {option["prefill"]: option["cost"] for option in found["options"]}
    assert list(costs) == ["prefill-1", "prefill-0"]
    assert costs["prefill-0"]["queue_s"] == 9.0
    for cost in costs.values():
        parts = sum(value for name, value in cost.items() if name != "total_s")
        assert cost["total_s"] == pytest.approx(parts, abs=1e-5)
    assert {one["worker"]: one["queued_tokens"] for one in found["workers"]}["prefill-0"] == 9000
    assert {name: len(worker.submits) for name, worker in house.workers.items()} == submitted
    plans = house.metric("tandem_plans_total")
    assert admin(house, "explain", {"messages": [{"role": "user", "content": "Hi"}]})[0] == 200
    assert house.metric("tandem_plans_total") == plans


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "either prompt or messages"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "either prompt or messages"),
        ({"prompt": "a", "promt": "b"}, "unknown parameter"),
        ({"prompt": [99999]}, "token id 99999"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "model": "other"}, "does not exist"),
        ([1], "wrong"),
    ],
)
def test_explain_refuses_what_a_request_would_be_refused_for(build: Build, body: object, words: str) -> None:
    house = build()
    house.wait_ready()
    status, found = admin(house, "explain", body)
    assert status in (400, 404)
    assert words in found["error"]["message"]


def test_routes_need_the_admin_key(build: Build) -> None:
    house = build()
    for path in ("policy", "explain"):
        assert httpx.post(f"{house.admin_url}/admin/v1/route/{path}", json={}).status_code == 401
    assert httpx.get(f"{house.admin_url}/admin/v1/route/policy").status_code == 401


def test_nobody_to_explain_with(build: Build) -> None:
    house = build(prefill=1, decode=0)
    status, found = admin(house, "explain", {"prompt": "Hello"})
    assert status == 503
    assert "no decode worker is connected" in found["error"]["message"] or "no prefill" in found["error"]["message"]


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_asks_gets_the_decision(build: Build, is_stream: bool) -> None:
    house = build()
    house.wait_ready()
    assert "x-tandem-route" not in complete(house, stream=is_stream).headers
    answer = complete(house, {"X-Tandem-Route": "1"}, stream=is_stream)
    found = json.loads(answer.headers["x-tandem-route"])
    assert (found["prefill"], found["decode"], found["policy"]) == ("prefill-0", "decode-0", "cost")
    assert [option["cost"]["total_s"] for option in found["options"]] == sorted(o["score"] for o in found["options"])
    assert house.metric("tandem_predicted_time_to_first_token_seconds_count") == 2
    assert house.metric("tandem_time_to_first_token_error_seconds_count") == 2


def test_a_policy_is_changed_under_load_without_a_failed_request(build: Build) -> None:
    house = build(prefill=2, decode=2, mixed=1, mode=Disaggregation.AUTO, script=Script(prefill_s=0.002))
    house.wait_ready()
    assert admin(house, "policy") == (200, {"policy": "cost", "policies": [name.value for name in PolicyName]})
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(complete, house, {"X-Tandem-Route": "1"}) for _ in range(120)]
        for name in (*PolicyName, "cost", "round_robin"):
            pending = [answer for answer in answers if not answer.done()]
            assert admin(house, "policy", {"policy": name})[1]["policy"] == name
            house.wait(partial(_any_done, pending))
        found = [answer.result() for answer in answers]
    assert [answer.status_code for answer in found] == [200] * 120
    assert len({json.loads(answer.headers["x-tandem-route"])["policy"] for answer in found}) >= 5
    assert house.status()["policy"] == "round_robin"


def test_a_policy_that_does_not_exist_changes_nothing(build: Build) -> None:
    house = build(policy=PolicyName.LEAST_LOADED)
    house.wait_ready()
    for body in ({"policy": "fastest"}, {"policy": 7}, {"name": "cost"}, {}):
        status, found = admin(house, "policy", body)
        assert (status, bool(found["error"]["message"])) == (400, True)
    assert admin(house, "policy")[1]["policy"] == "least_loaded"
    answer = httpx.post(f"{house.admin_url}/admin/v1/route/policy", headers=HEADERS, content=b"{")
    assert (answer.status_code, "not valid JSON" in answer.text) == (400, True)


def test_own_dispatches_count_at_once(build: Build) -> None:
    """Two prompts at the same moment, two prefill workers, no load report: they go to different ones."""
    house = build(prefill=2, decode=1)
    house.wait_ready()
    for worker in house.workers.values():
        worker.script.is_held = True
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(complete, house, max_tokens=2) for _ in range(4)]
        house.wait(lambda: sum(len(house.workers[f"prefill-{i}"].submitted) for i in range(2)) == 4)
        assert [len(house.workers[f"prefill-{i}"].submitted) for i in range(2)] == [2, 2]
        for worker in house.workers.values():
            worker.script.is_held = False
        assert {answer.result().status_code for answer in answers} == {200}
