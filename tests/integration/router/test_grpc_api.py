"""gRPC gives the same tokens and the same complaints as HTTP."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from tandem.core.errors import STATUS
from tandem.router.api import grpc_service
from tandem.router.api.grpc_service import SERVICE
from tandem.router.serving.response_stream import ResponseFactory, ResponseStream
from tandem.rpc.v1 import inference_pb2 as i
from tandem.rpc.v1 import inference_pb2_grpc as i_grpc
from tests.integration.router.house import Build, RouterHarness
from tests.integration.router.scripted_worker import Script
from tools.waiting import wait_for


def generate(house: RouterHarness, request: i.GenerateRequest) -> list[i.GenerateResponse]:
    with grpc.insecure_channel(f"127.0.0.1:{house.ports['grpc']}") as channel:
        return list(i_grpc.InferenceStub(channel).Generate(request, timeout=15))


def test_same_answer_as_http(shared: RouterHarness) -> None:
    sampling = i.GenerateSampling(max_tokens=25, seed=7, n=2, logprobs=1)
    responses = generate(shared, i.GenerateRequest(model="tiny", text="Hello", sampling=sampling))
    assert [response.finished for response in responses].count(True) == 1
    assert responses[-1].finished
    texts, tokens = ["", ""], [[], []]  # type: list[str], list[list[int]]
    for response in responses:
        for delta in response.choices:
            texts[delta.index] += delta.text
            tokens[delta.index] += delta.token_ids
            assert len(delta.logprobs) == len(delta.token_ids)
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": 25, "seed": 7, "n": 2}
    whole = httpx.post(f"{shared.url}/v1/completions", json=body).json()
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert [len(ids) for ids in tokens] == [25, 25]
    usage = responses[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole["usage"]["prompt_tokens"], 50)


def test_chat_and_token_ids(shared: RouterHarness) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 9, "temperature": 0}
    whole = httpx.post(f"{shared.url}/v1/chat/completions", json=body).json()
    ids = httpx.post(f"{shared.url}/tokenize", json={"messages": messages}).json()["tokens"]
    sampling = i.GenerateSampling(max_tokens=9, temperature=0)
    chat = i.ChatMessages(messages=[i.ChatMessage(role="user", content="Hi")])
    for request in (
        i.GenerateRequest(model="tiny", chat=chat, sampling=sampling),
        i.GenerateRequest(model="tiny", token_ids=i.TokenIds(ids=ids), sampling=sampling),
    ):
        text = "".join(delta.text for response in generate(shared, request) for delta in response.choices)
        assert text == whole["choices"][0]["message"]["content"]


def test_sampling_reaches_workers_as_over_http(shared: RouterHarness) -> None:
    plain: dict[str, Any] = {
        "max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "presence_penalty": 0.5, "n": 2,
        "frequency_penalty": -0.5, "repetition_penalty": 1.25, "seed": 3, "stop_token_ids": [5, 6], "ignore_eos": True,
        "logprobs": 2, "min_tokens": 4, "bad_words": ["word", " two words"], "allowed_token_ids": [9, 8, 7],
    }  # fmt: skip
    httpx.post(
        f"{shared.url}/v1/completions", json={"model": "tiny", "prompt": "Hi", "logit_bias": {"7": 2.5}, **plain}
    )
    generate(
        shared, i.GenerateRequest(model="tiny", text="Hi", sampling=i.GenerateSampling(logit_bias={7: 2.5}, **plain))
    )
    over_http, over_grpc = shared.workers["prefill-0"].submitted[-2:]
    assert over_http.request != over_grpc.request
    assert over_http.sampling == over_grpc.sampling
    assert len(over_grpc.sampling.bad_words) == 4
    for name, _ in over_grpc.sampling.ListFields():
        assert name.name in plain or name.name == "logit_bias"
    assert len(over_grpc.sampling.ListFields()) == len(plain) + 1


@pytest.mark.parametrize(
    ("request_", "code", "param"),
    [
        (i.GenerateRequest(model="no", text="a"), "model_not_found", "model"),
        (i.GenerateRequest(model="x" * 100_000, text="a"), "model_not_found", "model"),
        (i.GenerateRequest(model="tiny", chat=i.ChatMessages(messages=[i.ChatMessage(role="é" * 50_000)])),
         "invalid_request", "messages[0].role"),
        (i.GenerateRequest(model="tiny"), "invalid_request", "prompt"),
        (i.GenerateRequest(model="tiny", text="a", sampling=i.GenerateSampling(temperature=3)), "invalid_request",
         "temperature"),
        (i.GenerateRequest(model="tiny", text="a", sampling=i.GenerateSampling(n=99)), "invalid_request", "n"),
        (i.GenerateRequest(model="tiny", text="a", stop=["x"] * 17), "invalid_request", "stop"),
        (i.GenerateRequest(model="tiny", text="a", sampling=i.GenerateSampling(min_tokens=17)), "invalid_request",
         "min_tokens"),
        (i.GenerateRequest(model="tiny", text="a", sampling=i.GenerateSampling(bad_words=[""])), "invalid_request",
         "bad_words"),
        (i.GenerateRequest(model="tiny", text="a " * 9000), "context_length_exceeded", "prompt"),
        (i.GenerateRequest(model="tiny", text="a", sampling=i.GenerateSampling(max_tokens=9999)),
         "context_length_exceeded", "max_tokens"),
        (i.GenerateRequest(model="tiny", token_ids=i.TokenIds(ids=[70000])), "invalid_request", "prompt"),
        (i.GenerateRequest(model="tiny", chat=i.ChatMessages()), "invalid_request", "messages"),
    ],
)  # fmt: skip
def test_refused_by_name(shared: RouterHarness, request_: i.GenerateRequest, code: str, param: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        generate(shared, request_)
    error: Any = caught.value
    assert error.code().name == STATUS[code][1]
    trailing = dict(error.trailing_metadata())
    assert (trailing["tandem-code"], trailing["tandem-param"]) == (code, param)


def test_worker_lost_and_cancel(build: Build) -> None:
    house = build(worker_wait_s=0.0)
    house.wait_ready()
    decode = house.workers["decode-0"]
    decode.script = Script(stall_at=3)
    request = i.GenerateRequest(model="tiny", text="Hello", sampling=i.GenerateSampling(max_tokens=50))
    with grpc.insecure_channel(f"127.0.0.1:{house.ports['grpc']}") as channel:
        stream: Any = i_grpc.InferenceStub(channel).Generate(request, timeout=15)
        next(stream)
        stream.cancel()
        house.wait(lambda: len(decode.cancelled) == 1 and not house.router.dispatcher.flights)
        stream = i_grpc.InferenceStub(channel).Generate(request, timeout=15)
        next(stream)
        house.kill_worker("decode-0")
        with pytest.raises(grpc.RpcError) as caught:
            list(stream)
        error: Any = caught.value
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert dict(error.trailing_metadata())["tandem-code"] == "worker_lost"
        stub = health_pb2_grpc.HealthStub(channel)
        serving = health_pb2.HealthCheckResponse.SERVING
        house.wait(lambda: bool(house.router.readiness.missing()))

        def status() -> Any:
            return stub.Check(health_pb2.HealthCheckRequest(service=SERVICE)).status

        wait_for(lambda: status() != serving)
        decode.script = Script()
        house.restart_worker("decode-0")
        wait_for(lambda: status() == serving)


@pytest.mark.parametrize("where", ["opened", "answered"])
def test_a_bug_is_logged_with_the_requests_id(
    shared: RouterHarness, where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ids: list[str] = []

    def opened(desk: ResponseFactory, request: str, *rest: Any) -> ResponseStream:
        ids.append(request)
        raise ZeroDivisionError

    async def answered(answer: ResponseStream, shown: Any) -> AsyncIterator[i.GenerateResponse]:
        ids.append(answer.id)
        raise ZeroDivisionError
        yield i.GenerateResponse()

    if where == "opened":
        monkeypatch.setattr(ResponseFactory, "open", opened)
    else:
        monkeypatch.setattr(grpc_service, "_responses", answered)
    with pytest.raises(grpc.RpcError) as caught:
        generate(shared, i.GenerateRequest(model="tiny", text="Hello"))
    error: Any = caught.value
    assert (error.code(), error.details()) == (
        grpc.StatusCode.INTERNAL,
        "the router failed: ZeroDivisionError. Report this.",
    )
    (said,) = [record for record in caplog.records if record.getMessage() == "answer failed"]
    assert said.__dict__["fields"] == {"request": ids[0]}
    assert ids[0].startswith("gen-")
    shared.wait(lambda: not shared.router.dispatcher.flights)


def test_models_and_tokens(shared: RouterHarness) -> None:
    chat = i.ChatMessages(messages=[i.ChatMessage(role="user", parts=["one", "two"])])
    messages = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]
    with grpc.insecure_channel(f"127.0.0.1:{shared.ports['grpc']}") as channel:
        stub = i_grpc.InferenceStub(channel)
        listed = httpx.get(f"{shared.url}/v1/models").json()["data"]
        assert [
            (model.id, model.root, model.context_tokens) for model in stub.ListModels(i.ListModelsRequest()).models
        ] == [(model["id"], model["root"], model["max_model_len"]) for model in listed]
        for body, request in (
            ({"prompt": "Hello"}, i.TokenizeRequest(text="Hello")),
            (
                {"prompt": "Hello", "add_special_tokens": False},
                i.TokenizeRequest(text="Hello", add_special_tokens=False),
            ),
            ({"messages": messages}, i.TokenizeRequest(model="tiny", chat=chat)),
        ):
            tokens = httpx.post(f"{shared.url}/tokenize", json=body).json()
            answer = stub.Tokenize(request)
            assert (list(answer.ids), answer.context_tokens) == (tokens["tokens"], tokens["max_model_len"])
            text = httpx.post(f"{shared.url}/detokenize", json={"tokens": tokens["tokens"]}).json()["prompt"]
            assert stub.Detokenize(i.DetokenizeRequest(ids=answer.ids)).text == text


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (i.TokenizeRequest(), "prompt"),
        (i.TokenizeRequest(model="no", text="a"), "model"),
        (i.TokenizeRequest(chat=i.ChatMessages()), "messages"),
        (i.TokenizeRequest(chat=i.ChatMessages(messages=[i.ChatMessage(role="user", content="a", parts=["b"])])),
         "messages[0].parts"),
        (i.DetokenizeRequest(ids=[1 << 30]), "ids"),
        (i.DetokenizeRequest(model="no"), "model"),
    ],
)  # fmt: skip
def test_tokens_are_refused_by_name(shared: RouterHarness, request_: Any, param: str) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{shared.ports['grpc']}") as channel:
        stub = i_grpc.InferenceStub(channel)
        call: Any = stub.Tokenize if isinstance(request_, i.TokenizeRequest) else stub.Detokenize
        with pytest.raises(grpc.RpcError) as caught:
            call(request_, timeout=15)
    error: Any = caught.value
    assert error.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
    assert dict(error.trailing_metadata())["tandem-param"] == param


def test_a_deadline_is_the_requests(build: Build) -> None:
    house = build(script=Script(stall_at=3))
    house.wait_ready()
    prefill, decode = house.workers["prefill-0"], house.workers["decode-0"]
    request = i.GenerateRequest(model="tiny", text="Hello", sampling=i.GenerateSampling(max_tokens=50))
    with grpc.insecure_channel(f"127.0.0.1:{house.ports['grpc']}") as channel:
        stream: Any = i_grpc.InferenceStub(channel).Generate(request, timeout=1.0)
        next(stream)
        house.wait(lambda: bool(decode.submitted))
        assert 0 < prefill.submitted[-1].timeout_s < 1.05, "gRPC sends three digits of a deadline, rounded up"
        assert 0 < decode.submitted[-1].timeout_s < 1.05
        with pytest.raises(grpc.RpcError) as caught:
            list(stream)
        error: Any = caught.value
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        house.wait(lambda: len(decode.cancelled) == 1 and not house.router.dispatcher.flights)
        stream = i_grpc.InferenceStub(channel).Generate(request)
        next(stream)
        limit_s = house.config.settings.request_timeout_s
        assert limit_s - 30.0 < prefill.submitted[-1].timeout_s <= limit_s
        stream.cancel()
        house.wait(lambda: len(decode.cancelled) == 2 and not house.router.dispatcher.flights)


def test_reflection(shared: RouterHarness) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{shared.ports['grpc']}") as channel:
        pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        assert "Generate" in pool.FindServiceByName(SERVICE).methods_by_name
