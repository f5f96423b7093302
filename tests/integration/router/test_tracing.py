"""Traces as a receiver gets them: one tree a call, with any outcome, and nothing that a client sent in it."""

import concurrent.futures
import json
import logging
import re
import time
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from tandem.core import logs
from tandem.core.config import Disaggregation, StoreSection, TracingSection
from tandem.rpc.v1 import inference_pb2 as i
from tandem.rpc.v1 import inference_pb2_grpc as i_grpc
from tandem.statestore.embedded_redis import PrivateRedis
from tests.integration.router.house import Build, RouterHarness, ask, builder
from tests.integration.router.leaving import ask as begin_asking
from tests.integration.router.scripted_worker import Script
from tools.otlp_receiver import ReceivedSpan, Receiver, receiving
from tools.waiting import wait_for

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARTS = ["queue", "prefill", "transfer", "decode"]
COMPLETION = {"model": "tiny", "prompt": "Hello", "max_tokens": 8, "temperature": 0}
SLOW = Script(prefill_s=0.15, transfer_s=0.05, step_s=0.02)


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        yield receiver


@pytest.fixture(scope="module")
def house(receiver: Receiver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterHarness]:
    """A slow pair."""
    with builder(tmp_path_factory.mktemp("router")) as make:
        house = make(tracing=TracingSection(endpoint=receiver.url), script=SLOW)
        house.wait_ready()
        yield house


def parent(flags: str = "01") -> dict[str, str]:
    return {"traceparent": f"00-{TRACE}-{PARENT}-{flags}"}


def is_sampled(answer: httpx.Response) -> bool:
    return bool(int(answer.headers["traceresponse"].split("-")[3], 16) & 1)


def check_sum(receiver: Receiver, root: ReceivedSpan) -> None:
    """The leaves are the call, to the microsecond."""
    assert sum(leaf.took_s for leaf in receiver.leaves(root)) == pytest.approx(root.took_s, abs=1e-5)


def check_whole(receiver: Receiver, root: ReceivedSpan, latency_s: float) -> bool:
    """Every part is there and nothing is counted twice. Whether each took what it should, and all of it what the client
    waited for: a machine that is busy elsewhere makes some calls longer, but not all of them."""
    check_sum(receiver, root)
    (attempt,) = [one for one in receiver.below(root) if one.name == "attempt"]
    parts = receiver.below(attempt)
    assert [part.name for part in parts] == PARTS
    assert not any(one.is_error for one in (root, attempt, *parts))
    return bool(
        root.took_s < latency_s  # not of each: a client may have its last byte before the router's thread goes on
        and root.took_s == pytest.approx(latency_s, rel=0.05, abs=0.01)
        and 0.99 * SLOW.prefill_s < parts[1].took_s < 1.3 * SLOW.prefill_s
        and 0.99 * SLOW.transfer_s < parts[2].took_s < 1.5 * SLOW.transfer_s
    )


@pytest.mark.parametrize("is_stream", [False, True])
def test_one_call_is_one_tree_that_adds_up(house: RouterHarness, receiver: Receiver, is_stream: bool) -> None:
    def called() -> tuple[httpx.Response, ReceivedSpan] | None:
        with httpx.Client() as client:
            client.get(f"{house.url}/livez")  # the connection is there
            began_s = time.perf_counter()
            answer = client.post(f"{house.url}/v1/completions", json={**COMPLETION, "stream": is_stream})
            latency_s = time.perf_counter() - began_s
        root = receiver.root(answer.headers["x-request-id"])
        return (answer, root) if check_whole(receiver, root, latency_s) else None

    answer, root = wait_for(called, what="a call whose parts take what they should")
    assert (root.name, root.is_server, root.parent) == ("text_completion tandem-tiny", True, "")
    assert answer.headers["traceresponse"].startswith(f"00-{root.trace}-{root.id}-")
    assert is_sampled(answer)
    told = {name: root.attributes[f"gen_ai.{name}"] for name in ("request.model", "response.model", "operation.name")}
    assert told == {"request.model": "tiny", "response.model": "tandem-tiny", "operation.name": "text_completion"}
    assert (root.attributes["gen_ai.usage.output_tokens"], root.attributes["gen_ai.request.max_tokens"]) == (8, 8)
    assert root.attributes["http.route"] == "/v1/completions"
    assert "error.type" not in root.attributes
    assert receiver.paths[-1] == "/v1/traces"
    assert {"service.name": "tandem-router", "service.namespace": "test", "service.instance.id": "r1"}.items() <= (
        receiver.resources[-1].items()
    )


def test_it_is_the_same_trace_that_clusterctl_shows(house: RouterHarness, receiver: Receiver) -> None:
    request = ask(house).headers["x-request-id"]
    parts = [leaf for leaf in receiver.leaves(receiver.root(request)) if leaf.name in PARTS]
    headers = {"authorization": f"Bearer {'k' * 32}"}
    found = httpx.get(f"{house.admin_url}/admin/v1/requests/{request}", headers=headers).json()
    shown = {span["span"]: span["end_s"] - span["start_s"] for span in found["spans"] if span["span"] != "wait"}
    assert {part.name: pytest.approx(part.took_s, abs=1e-5) for part in parts} == shown


def test_the_client_s_trace_is_gone_on_with(house: RouterHarness, receiver: Receiver) -> None:
    headers = {**parent(), "tracestate": "vendor=value"}
    answer = httpx.post(f"{house.url}/v1/completions", json=COMPLETION, headers=headers, timeout=60)
    root = receiver.root(answer.headers["x-request-id"])
    assert (root.trace, root.parent, root.state) == (TRACE, PARENT, "vendor=value")
    assert {one.trace for one in receiver.leaves(root)} == {TRACE}
    assert answer.headers["traceresponse"].startswith(f"00-{TRACE}-{root.id}-")


def test_grpc_goes_on_with_it_too(house: RouterHarness, receiver: Receiver) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{house.ports['grpc']}") as channel:
        sampling = i.GenerateSampling(max_tokens=4, temperature=0)
        request = i.GenerateRequest(model="tiny", text="Hello", sampling=sampling)
        call = i_grpc.InferenceStub(channel).Generate(request, metadata=tuple(parent().items()), timeout=60)
        responses, told = list(call), dict(call.initial_metadata())
    root = receiver.root(responses[0].id)
    assert (root.trace, root.parent) == (TRACE, PARENT)
    assert told["traceresponse"] == f"00-{TRACE}-{root.id}-01"
    assert root.attributes["rpc.method"] == "Generate"
    check_sum(receiver, root)


@pytest.mark.parametrize(
    "words",
    [
        "",
        "nonsense",
        f"00-{TRACE}-{PARENT}",
        f"00-{'0' * 32}-{PARENT}-01",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{TRACE}-\xff-01",
    ],
)
def test_a_malformed_parent_is_no_parent(house: RouterHarness, receiver: Receiver, words: str) -> None:
    headers = [(b"traceparent", words.encode("latin-1"))]
    answer = httpx.post(f"{house.url}/v1/completions", json=COMPLETION, headers=headers, timeout=60)
    assert answer.status_code == 200
    root = receiver.root(answer.headers["x-request-id"])
    assert root.parent == ""
    assert root.trace != TRACE


def test_chats_prompts_and_responses(house: RouterHarness, receiver: Receiver) -> None:
    body: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    answer = httpx.post(f"{house.url}/v1/chat/completions", json=body, timeout=60)
    root = receiver.root(answer.headers["x-request-id"])
    assert (root.name, root.attributes["http.route"]) == ("chat tandem-tiny", "/v1/chat/completions")
    answer = ask(house, prompt=["Hello", "there"], max_tokens=2)
    request = answer.headers["x-request-id"]
    attempts = [one for one in receiver.below(receiver.root(request)) if one.name == "attempt"]
    assert {one.attributes["tandem.request.id"] for one in attempts} == {f"{request}-0", f"{request}-1"}


@pytest.mark.parametrize("way", ["stream", "whole", "grpc"])
def test_a_client_that_leaves_ends_every_span(house: RouterHarness, receiver: Receiver, way: str) -> None:
    def cancelled() -> list[ReceivedSpan]:
        return [one for one in list(receiver.spans) if one.attributes.get("error.type") == "cancelled"]

    before = len(cancelled())
    http, rpc = (f"127.0.0.1:{house.ports[name]}" for name in ("http", "grpc"))
    leave = begin_asking(http, rpc, way, "Hello", max_tokens=400)
    house.wait(lambda: any(flight.output_tokens > 2 for flight in house.router.dispatcher.flights))
    leave()
    (root,) = wait_for(lambda: cancelled()[before:])
    assert root.name == "text_completion tandem-tiny"
    assert not root.is_error, "it is the client's own doing"
    assert [leaf.name for leaf in receiver.leaves(root)][-2:] == ["decode", "deliver"]
    check_sum(receiver, root)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({**COMPLETION, "model": "my own secret"}, "model_not_found"),
        ({**COMPLETION, "max_tokens": 10**6}, "context_length_exceeded"),
        ({**COMPLETION, "temperature": "my own secret"}, "invalid_request"),
    ],
)
def test_what_is_refused_is_a_span_with_its_code(
    house: RouterHarness, receiver: Receiver, body: dict[str, Any], code: str
) -> None:
    answer = httpx.post(f"{house.url}/v1/completions", json=body, timeout=60)
    assert answer.json()["error"]["code"] == code
    trace, span = answer.headers["traceresponse"].split("-")[1:3]
    root = wait_for(lambda: next((one for one in list(receiver.spans) if one.id == span), None))
    assert (root.trace, root.name, root.attributes["error.type"]) == (trace, "text_completion", code)
    assert not root.is_error
    assert not any(b"my own secret" in body for body in receiver.bodies)


def test_who_is_not_sampled_is_told_so_and_sends_nothing(house: RouterHarness, receiver: Receiver) -> None:
    other = TRACE.replace("0", "1")
    headers = {"traceparent": f"00-{other}-{PARENT}-00"}
    answer = httpx.post(f"{house.url}/v1/completions", json=COMPLETION, headers=headers, timeout=60)
    assert re.fullmatch(f"00-{other}-[0-9a-f]{{16}}-00", answer.headers["traceresponse"])
    receiver.root(ask(house).headers["x-request-id"])  # one that came later has arrived
    assert not any(one.trace == other for one in receiver.spans)


def test_a_worker_dies_and_the_next_attempt_is_on_the_same_tree(
    build: Build, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    house = build(
        prefill=1, decode=2, mode=Disaggregation.ALWAYS, tracing=TracingSection(endpoint=receiver.url),
        script=Script(stall_at=3, transfer_s=0.03),
    )  # fmt: skip
    house.wait_ready()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask, house)
        house.wait(lambda: [flight.output_tokens for flight in house.router.dispatcher.flights] == [3])
        (victim,) = [flight.plan.decode for flight in house.router.dispatcher.flights]
        for worker in house.workers.values():
            worker.script = Script(transfer_s=0.03)
        house.kill_worker(victim)
        answer = waiting.result(60)
    assert answer.status_code == 200
    root = receiver.root(answer.headers["x-request-id"])
    check_sum(receiver, root)
    attempts = [one for one in receiver.below(root) if one.name == "attempt"]
    assert [(one.attributes["tandem.attempt"], one.is_error) for one in attempts] == [(1, True), (2, False)]
    assert attempts[0].attributes["tandem.worker.decode"] == victim != attempts[1].attributes["tandem.worker.decode"]
    assert victim in attempts[0].attributes["tandem.attempt.why"]
    assert (root.is_error, root.attributes["gen_ai.usage.output_tokens"]) == (False, 8)
    assert [[part.name for part in receiver.below(one)] for one in attempts] == [PARTS, PARTS]
    (said,) = [record for record in caplog.records if record.getMessage() == "attempt failed"]
    names: dict[str, Any] = said.__dict__["fields"]
    assert (names["request"], names["trace"]) == (answer.headers["x-request-id"], root.trace)
    assert {submit.trace for worker in house.workers.values() for submit in worker.submitted} == {root.trace}


def test_requests_of_a_batch_are_calls_of_their_own(
    receiver: Receiver, redis: PrivateRedis, tmp_path: Path, build: Build
) -> None:
    house = build(
        redis_url=redis.url, cluster="traced", store=StoreSection(dir=str(tmp_path / "files")),
        tracing=TracingSection(endpoint=receiver.url),
    )  # fmt: skip
    house.wait_ready()
    lines = [
        json.dumps({"custom_id": f"c{n}", "method": "POST", "url": "/v1/completions", "body": COMPLETION})
        for n in (1, 2)
    ]
    form: Any = {"purpose": (None, "batch"), "file": ("in.jsonl", "\n".join(lines).encode())}
    file = httpx.post(f"{house.url}/v1/files", files=form, timeout=60).json()["id"]
    wish = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    before = len(receiver.spans)
    httpx.post(f"{house.url}/v1/batches", json=wish, timeout=60).raise_for_status()

    def background() -> list[ReceivedSpan]:
        return [one for one in receiver.spans[before:] if one.attributes.get("tandem.is_background")]

    roots = wait_for(lambda: len(background()) == 2 and background())
    for root in roots:
        assert root.parent == ""
        check_sum(receiver, root)


def test_nothing_that_a_client_sent_is_in_traces_or_logs(build: Build, receiver: Receiver) -> None:
    house = build(prefill=1, decode=2, tracing=TracingSection(endpoint=receiver.url), script=Script(stall_at=2))
    house.wait_ready()
    text, root_logger = StringIO(), logging.getLogger()
    handlers, level = list(root_logger.handlers), root_logger.level
    logs.setup("router", level="DEBUG", stream=text)
    try:
        secrets = _ask_with_secrets(house)
    finally:
        root_logger.handlers[:] = handlers
        root_logger.setLevel(level)
    wait_for(lambda: sum(one.is_server for one in list(receiver.spans)) >= 1)
    assert "attempt failed" in text.getvalue()
    posted = b"".join(receiver.bodies) + repr(receiver.headers).encode()
    for secret in secrets:
        assert secret not in text.getvalue()
        assert secret.encode() not in posted


def _ask_with_secrets(house: RouterHarness) -> list[str]:
    """Requests with secrets wherever a client can write; one is tried again, others are refused. The secrets, and the
    answer's text."""
    secrets = [
        f"planted-{name}" for name in ("prompt", "stop", "user", "salt", "cache", "header", "bearer", "model", "chat")
    ]
    prompt, stop, user, salt, cache, header, bearer, model, chat = secrets
    headers = {"authorization": f"Bearer {bearer}", "x-custom": header, "cookie": header, "baggage": f"k={header}"}
    body = {**COMPLETION, "prompt": prompt, "stop": stop, "user": user, "cache_salt": salt, "prompt_cache_key": cache}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        url = f"{house.url}/v1/completions"
        waiting = pool.submit(httpx.post, url, json=body, headers={**headers, **parent()}, timeout=60)
        house.wait(lambda: [flight.output_tokens for flight in house.router.dispatcher.flights] == [2])
        (victim,) = [flight.plan.decode for flight in house.router.dispatcher.flights]
        for worker in house.workers.values():
            worker.script = Script(transfer_s=0.03)
        house.kill_worker(victim)
        answer = waiting.result(60)
    assert answer.status_code == 200, answer.text
    for wrong in ({"model": model}, {"temperature": prompt}, {"stop": [stop] * 99}, {prompt: 1}, {"prompt": [10**6]}):
        assert httpx.post(url, json={**body, **wrong}, headers=headers, timeout=60).status_code in (400, 404)
    messages = [{"role": "user", "content": chat}]
    done = httpx.post(
        f"{house.url}/v1/chat/completions", json={"model": "tiny", "messages": messages, "max_tokens": 3},
        headers=headers, timeout=20,
    )  # fmt: skip
    assert done.status_code == 200, done.text
    return [*secrets, answer.json()["choices"][0]["text"]]


@pytest.mark.parametrize("trouble", ["nobody listens", "it fails"])
def test_a_dead_receiver_slows_and_fails_nothing(build: Build, trouble: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    with receiving() as dead:
        dead.status = 503
        if trouble == "nobody listens":
            dead.url = "http://127.0.0.1:9"
        house = build(tracing=TracingSection(endpoint=dead.url))
        house.wait_ready()
        plain = build(cluster="plain")
        plain.wait_ready()
        plain_s, traced_s = (_time_of_answers(one) for one in (plain, house))
        assert traced_s < 2 * plain_s + 0.5
        began_s = time.perf_counter()
        house.stop()
        assert time.perf_counter() - began_s < 10


def _time_of_answers(house: RouterHarness) -> float:
    began_s = time.perf_counter()
    assert [ask(house).status_code for _ in range(20)] == [200] * 20
    return time.perf_counter() - began_s


def test_who_samples_nothing_sends_nothing(build: Build, receiver: Receiver) -> None:
    house = build(tracing=TracingSection(endpoint=receiver.url, sample_ratio=0.0))
    house.wait_ready()
    answers = [ask(house) for _ in range(5)]
    assert not any(is_sampled(answer) for answer in answers)
    asked = httpx.post(f"{house.url}/v1/completions", json=COMPLETION, headers=parent(), timeout=60)
    receiver.root(asked.headers["x-request-id"])  # its client wants it to be traced
    traces = {answer.headers["traceresponse"].split("-")[1] for answer in answers}
    assert not any(one.trace in traces for one in receiver.spans)


def test_without_tracing_no_header_tells_of_it(build: Build) -> None:
    house = build()
    house.wait_ready()
    assert "traceresponse" not in ask(house).headers
