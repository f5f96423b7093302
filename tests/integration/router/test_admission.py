"""Requests that wait in a router: fair between keys, cancelled, late, too many; and the answers that clients get."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
from typer.testing import CliRunner

from tandem.clusterctl.serving_policy import slo
from tandem.core.config import AdmissionSection, SloSection
from tandem.router.tokenization.tokenizer import LONG_TEXT_CHARS
from tandem.rpc.v1 import inference_pb2 as i
from tandem.rpc.v1 import inference_pb2_grpc as i_grpc
from tests.integration.router.house import ADMIN_KEY, Build, RouterHarness
from tests.integration.router.leaving import WAYS, ask
from tools.waiting import wait_for

ONE_AT_A_TIME = AdmissionSection(worker_queue_s=0.0, worker_queue_requests=1, quantum_tokens=8)
SLO = {"chat": SloSection(ttft_s=0.5, itl_s=1.0), "patient": SloSection(ttft_s=60.0)}


def body(prompt: str = "Hi", **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, "max_tokens": 2, **more}


def post(house: RouterHarness, headers: dict[str, str] | None = None, **more: Any) -> httpx.Response:
    return httpx.post(f"{house.url}/v1/completions", json=body(**more), headers=headers or {}, timeout=30)


@pytest.fixture
def busy(build: Build) -> Iterator[RouterHarness]:
    """A router with an only prefill worker that does not go on with its first prompt."""
    house = build(admission=ONE_AT_A_TIME, slo=SLO)
    with held(house, 1) as pool:
        pool.submit(post, house)
        house.wait(lambda: len(house.workers["prefill-0"].submitted) == 1)
        yield house


@contextmanager
def held(house: RouterHarness, threads: int) -> Iterator[ThreadPoolExecutor]:
    """Clients in threads of their own, all of them served when this ends, and none before."""
    house.wait_ready()
    script = house.workers["prefill-0"].script
    script.is_held = True
    with ThreadPoolExecutor(threads) as pool:
        try:
            yield pool
        finally:
            script.is_held = False


def await_count(house: RouterHarness, name: str, value: int) -> None:
    """Answers are counted once they have been sent."""
    wait_for(lambda: house.metric(name) == value, what=f"{name} is {value}")


def refusal(answer: httpx.Response) -> tuple[int, str]:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return answer.status_code, error["code"]


@pytest.mark.parametrize("way", WAYS)
def test_a_client_that_leaves_while_it_waits_leaves_nothing(busy: RouterHarness, way: str) -> None:
    http, rpc = (f"127.0.0.1:{busy.ports[name]}" for name in ("http", "grpc"))
    leave = ask(http, rpc, way, "Hi", max_tokens=2)
    busy.wait(lambda: busy.router.admission.waiting == 1)
    leave()
    busy.wait(lambda: not busy.router.admission.waiting)
    assert len(busy.workers["prefill-0"].submitted) == 1
    assert len(busy.workers["decode-0"].submitted) == 1
    busy.wait(lambda: len(busy.router.dispatcher.flights) == 1)
    assert busy.metric("tandem_admission_waiting_requests") == 0


@pytest.mark.parametrize("how", ["header", "body"])
def test_a_deadline_that_passes_while_it_waits(busy: RouterHarness, how: str) -> None:
    given: dict[str, Any] = {"headers": {"X-Request-Timeout": "0.2"}} if how == "header" else {"timeout": 0.2}
    answer = post(busy, **given)
    assert refusal(answer) == (504, "deadline_exceeded")
    assert answer.headers["x-should-retry"] == "false"
    assert len(busy.workers["prefill-0"].submitted) == 1


def test_what_would_come_too_late_for_its_class_is_sent_back_and_not_computed(busy: RouterHarness) -> None:
    answer = post(busy, headers={"X-SLO-Class": "chat"})
    assert refusal(answer) == (503, "overloaded")
    assert answer.headers["x-should-retry"] == "true"
    assert int(answer.headers["retry-after"]) >= 1
    assert 100 <= int(answer.headers["retry-after-ms"]) <= 60_000
    assert len(busy.workers["prefill-0"].submitted) == 1
    assert busy.metric('tandem_admission_refused_total{reason="late"}') == 1
    await_count(busy, 'tandem_slo_requests_total{outcome="failed",slo="chat"}', 1)


def test_too_many_wait(build: Build) -> None:
    house = build(admission=AdmissionSection(worker_queue_s=0.0, worker_queue_requests=1, max_waiting=1))
    with held(house, 2) as pool:
        served = [pool.submit(post, house) for _ in range(2)]
        house.wait(lambda: house.router.admission.waiting == 1)
        answer = post(house)
    assert [each.result().status_code for each in served] == [200, 200]
    assert refusal(answer) == (503, "overloaded")
    assert "too many requests wait" in answer.json()["error"]["message"]
    assert answer.headers["retry-after"]


def test_the_openai_client_sees_what_it_is_told(busy: RouterHarness) -> None:
    client = openai.OpenAI(base_url=f"{busy.url}/v1", api_key="none", max_retries=0, timeout=20)
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(
            model="tiny", prompt="Hi", max_tokens=2, extra_headers={"X-SLO-Class": "chat"}, stream=True
        )
    assert caught.value.status_code == 503
    assert caught.value.code == "overloaded"


def generate(house: RouterHarness, timeout_s: float = 20.0, **more: Any) -> list[i.GenerateResponse]:
    request = i.GenerateRequest(model="tiny", text="Hi", **more)
    request.sampling.max_tokens = 2
    with grpc.insecure_channel(f"127.0.0.1:{house.ports['grpc']}") as channel:
        return list(i_grpc.InferenceStub(channel).Generate(request, timeout=timeout_s))


def test_over_grpc(busy: RouterHarness) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        generate(busy, slo_class="chat")
    failure: Any = caught.value
    assert failure.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert 100 <= int(dict(failure.trailing_metadata())["grpc-retry-pushback-ms"]) <= 60_000
    with pytest.raises(grpc.RpcError) as caught:
        generate(busy, timeout_s=0.3)
    failure = caught.value
    assert failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    busy.wait(lambda: not busy.router.admission.waiting)
    assert len(busy.workers["prefill-0"].submitted) == 1
    with pytest.raises(grpc.RpcError) as caught:
        generate(busy, slo_class="gold")
    failure = caught.value
    assert failure.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert dict(failure.trailing_metadata())["tandem-param"] == "slo_class"


def test_fair_between_keys(build: Build) -> None:
    """A client with one request does not wait for all of another one's seven earlier requests."""
    house = build(admission=ONE_AT_A_TIME)
    keys = {}
    for tenant in ("greedy", "modest"):
        made = httpx.post(
            f"{house.admin_url}/admin/v1/keys", json={"tenant": tenant},
            headers={"authorization": f"Bearer {ADMIN_KEY}"},
        )  # fmt: skip
        keys[tenant] = {"authorization": f"Bearer {made.json()['key']}"}
    with held(house, 8) as pool:
        answers = [pool.submit(post, house, keys["greedy"], prompt="a" * 50) for _ in range(7)]
        house.wait(lambda: house.router.admission.waiting == 6)
        answers.append(pool.submit(post, house, keys["modest"], prompt="b" * 50))
        house.wait(lambda: house.router.admission.waiting == 7)
    assert [each.result().status_code for each in answers] == [200] * 8
    order = [bytes(submit.salt) for submit in house.workers["prefill-0"].submitted]
    (alone,) = [salt for salt in set(order) if order.count(salt) == 1]
    assert order.index(alone) <= 2
    assert "tandem_admission_wait_seconds_count 7.0" in httpx.get(f"{house.admin_url}/metrics").text


def test_priorities_among_requests_of_one_key(build: Build) -> None:
    house = build(admission=ONE_AT_A_TIME)
    with held(house, 3) as pool:
        answers = [pool.submit(post, house, prompt="one")]
        house.wait(lambda: len(house.workers["prefill-0"].submitted) == 1)
        answers.append(pool.submit(post, house, prompt="two three", priority=9))
        house.wait(lambda: house.router.admission.waiting == 1)
        answers.append(pool.submit(post, house, prompt="four five six", priority=1))
        house.wait(lambda: house.router.admission.waiting == 2)
    assert [each.result().status_code for each in answers] == [200, 200, 200]
    lengths = [len(submit.prompt) for submit in house.workers["prefill-0"].submitted]
    assert lengths[1] > lengths[2]


def test_a_promise_that_is_kept_is_counted(build: Build) -> None:
    slo = {"chat": SloSection(ttft_s=30.0, itl_s=30.0), "patient": SloSection(ttft_s=60.0)}
    house = build(slo=slo, admission=AdmissionSection(default_slo="patient"))
    house.wait_ready()
    assert post(house, headers={"X-SLO-Class": "chat"}).status_code == 200
    assert post(house).status_code == 200
    assert generate(house, slo_class="chat", priority=3)[-1].finished
    await_count(house, 'tandem_slo_requests_total{outcome="met",slo="chat"}', 2)
    await_count(house, 'tandem_slo_requests_total{outcome="met",slo="patient"}', 1)


@pytest.mark.parametrize(
    ("headers", "more", "status", "param"),
    [
        ({"X-SLO-Class": "gold"}, {}, 400, "X-SLO-Class"),
        ({"X-Request-Timeout": "soon"}, {}, 400, "X-Request-Timeout"),
        ({"X-Request-Timeout": "-1"}, {}, 400, "X-Request-Timeout"),
        ({}, {"timeout": 0}, 400, "timeout"),
        ({}, {"priority": 1000}, 400, "priority"),
        ({}, {"priority": -1}, 403, "priority"),
    ],
)
def test_wishes_that_cannot_be_had(
    shared: RouterHarness, headers: dict[str, str], more: dict[str, Any], status: int, param: str
) -> None:
    answer = post(shared, headers, **more)
    assert answer.status_code == status
    assert answer.json()["error"]["param"] == param


def test_a_router_that_stops_serves_those_that_wait(build: Build) -> None:
    house = build(admission=ONE_AT_A_TIME)
    with held(house, 3) as pool:
        answers = [pool.submit(post, house) for _ in range(3)]
        house.wait(lambda: house.router.admission.waiting == 2)
        house.loop.call_soon_threadsafe(house.router.stop)
        house.wait(lambda: house.router.readiness.is_draining)
    assert [each.result().status_code for each in answers] == [200, 200, 200]
    house.stop()


def test_the_status_says_who_waits_and_who_was_refused(busy: RouterHarness) -> None:
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(post, busy, {"X-SLO-Class": "patient"}) for _ in range(2)]
        await_count(busy, "tandem_admission_waiting_requests", 2)
        assert post(busy, {"X-Request-Timeout": "0.5"}).status_code in (503, 504)
        admission = busy.status()["admission"]
        (lane,) = admission["models"]
        assert lane["classes"] == {"patient": 2}
        assert [(row["tenant"], row["waiting"]) for row in lane["tenants"]] == [("anonymous", 2)]
        assert sum(admission["refused"].values()) == 1
        busy.workers["prefill-0"].script.is_held = False
        assert {one.result(30).status_code for one in waiting} == {200}
    assert busy.status()["admission"]["waiting"] == 0


def test_the_command_line_shows_and_changes_slo_classes(build: Build, tmp_path: Path) -> None:
    house = build(slo=SLO, admission=AdmissionSection(default_slo="chat"))
    (tmp_path / "key").write_text(ADMIN_KEY)
    way = ["--endpoint", house.admin_url, "--admin-key-file", str(tmp_path / "key")]
    shown = CliRunner().invoke(slo.app, ["list", *way])
    assert shown.output.splitlines() == ["chat (of requests that name none): TTFT 0.5 s, ITL 1 s", "patient: TTFT 60 s"]
    changed = CliRunner().invoke(slo.app, ["set", "chat", "--ttft", "0.8", "--json", "--yes", *way])
    assert json.loads(changed.output)["classes"][0] == {"slo": "chat", "ttft_s": 0.8, "itl_s": 1.0}
    CliRunner().invoke(slo.app, ["set", "chat", "--itl", "0", "--yes", *way])
    assert "chat (of requests that name none): TTFT 0.8 s\n" in CliRunner().invoke(slo.app, ["list", *way]).output
    CliRunner().invoke(slo.app, ["set", "new", "--itl", "2", "--yes", *way])
    assert "new: ITL 2 s\n" in CliRunner().invoke(slo.app, ["list", *way]).output


def test_slo_classes_change_while_requests_run(build: Build) -> None:
    house = build(slo=SLO)
    house.wait_ready()
    slo_url, headers = f"{house.admin_url}/admin/v1/slo", {"authorization": f"Bearer {ADMIN_KEY}"}
    assert httpx.get(slo_url).status_code == 401
    assert refusal(post(house, {"X-SLO-Class": "bulk"})) == (400, "invalid_request")
    said = httpx.post(slo_url, headers=headers, json={"slo": "bulk", "ttft_s": 9.0})
    assert said.status_code == 200
    assert {"slo": "bulk", "ttft_s": 9.0, "itl_s": 0.0} in said.json()["classes"]
    assert httpx.get(slo_url, headers=headers).json() == said.json()
    assert post(house, {"X-SLO-Class": "bulk"}).status_code == 200
    await_count(house, 'tandem_slo_requests_total{outcome="met",slo="bulk"}', 1)
    for wrong in ({"slo": "bulk", "ttft_s": -1}, {"slo": "a b"}, {"ttft_s": 1.0}, {"slo": "bulk", "itl": 1.0}):
        answer = httpx.post(slo_url, headers=headers, json=wrong)
        assert answer.status_code == 400, wrong
        assert answer.json()["error"]["param"]


def test_a_deadline_holds_while_the_prompt_is_tokenised(build: Build) -> None:
    house = build()
    house.wait_ready()
    go_on = threading.Event()
    thread = house.router.frontend.models.find("tiny").tokenizer._thread
    standing = thread.submit(go_on.wait, 60.0)
    try:
        answer = post(house, {"X-Request-Timeout": "0.2"}, prompt="Hi " * LONG_TEXT_CHARS)
        assert not standing.done()
    finally:
        go_on.set()
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert not house.workers["prefill-0"].submitted
