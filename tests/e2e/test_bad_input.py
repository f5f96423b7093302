"""A real cluster answers every invalid request with an error that names its cause, and serves the next one."""

import http.client
import json
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from tandem.rpc.v1 import inference_pb2 as i
from tandem.rpc.v1 import inference_pb2_grpc
from tools.running_cluster import Cluster
from tools.waiting import wait_for

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER: Any = [{"role": "user", "content": "Hi"}]
JSON = {"content-type": "application/json"}


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "tandem-tiny", "messages": USER, "max_tokens": 2, **more}


def text(**more: Any) -> dict[str, Any]:
    return {"model": "tandem-tiny", "prompt": "Hi", "max_tokens": 2, **more}


def message(content: Any, role: str = "user", **more: Any) -> dict[str, Any]:
    return chat(messages=[*USER, {"role": role, "content": content, **more}])


def deep(levels: int) -> dict[str, Any]:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return chat(metadata=value)


FIELDS: list[tuple[str, str, dict[str, Any], str]] = [
    # what is wrong, path, body, the field that the error names
    ("no model", CHAT, {"messages": USER}, "model"),
    ("model of a wrong type", CHAT, chat(model=7), "model"),
    ("no messages", CHAT, chat(messages=[]), "messages"),
    ("messages of a wrong type", CHAT, chat(messages={}), "messages"),
    ("a message of a wrong type", CHAT, chat(messages=["Hi"]), "messages[0]"),
    ("an unknown role", CHAT, message("x", "wizard"), "messages[1].role"),
    ("content that is null", CHAT, message(None), "messages[1].content"),
    ("content that is an object", CHAT, message({}), "messages[1].content"),
    ("an image", CHAT, message([{"type": "image_url", "image_url": {"url": "x"}}]), "messages[1].content[0].type"),
    ("audio", CHAT, message([{"type": "input_audio", "input_audio": {}}]), "messages[1].content[0].type"),
    ("a tool's answer", CHAT, message("x", "tool"), "messages[1].tool_call_id"),
    (
        "a call of a tool",
        CHAT,
        message(None, "assistant", tool_calls=[{"id": "a"}]),
        "messages[1].tool_calls[0].function",
    ),
    ("a part with a number as text", CHAT, message([{"type": "text", "text": 5}]), "messages[1].content[0].text"),
    ("an unknown field of a part", CHAT, message([{"type": "text", "text": "x", "z": 1}]), "messages[1].content[0].z"),
    ("an unknown field of a message", CHAT, message("x", cache_control=1), "messages[1].cache_control"),
    ("prompt too long", CHAT, message("word " * 9000), "messages"),
    ("prompt too long", TEXT, text(prompt="word " * 9000), "prompt"),
    ("a million letters", TEXT, text(prompt="a" * 1_000_000), "prompt"),
    ("token ids too long", TEXT, text(prompt=[5] * 4096), "prompt"),
    ("empty prompt", TEXT, text(prompt=[]), "prompt"),
    ("empty token ids", TEXT, text(prompt=[[]]), "prompt"),
    ("no prompt", TEXT, {"model": "tandem-tiny"}, "prompt"),
    ("prompt null", TEXT, text(prompt=None), "prompt"),
    ("prompt an object", TEXT, text(prompt={}), "prompt"),
    ("prompt of mixed types", TEXT, text(prompt=[1, "a"]), "prompt"),
    ("token ids that are no integers", TEXT, text(prompt=[1.5, True]), "prompt"),
    ("a token id beyond the vocabulary", TEXT, text(prompt=[1, 99999]), "prompt"),
    ("a negative token id", TEXT, text(prompt=[1, -1]), "prompt"),
    ("a token id beyond 64 bits", TEXT, text(prompt=[2**70]), "prompt"),
    ("too many prompts", TEXT, text(prompt=["a"] * 33), "prompt"),
    ("max_tokens of a wrong type", CHAT, chat(max_tokens="many"), "max_tokens"),
    ("max_tokens 0", CHAT, chat(max_tokens=0), "max_tokens"),
    ("max_tokens beyond the context", CHAT, chat(max_tokens=4096), "max_tokens"),
    ("max_tokens beyond the context", TEXT, text(max_tokens=2**62), "max_tokens"),
    ("max_tokens beyond 64 bits", TEXT, text(max_tokens=2**64), "max_tokens"),
    ("both limits", CHAT, chat(max_completion_tokens=3), "max_completion_tokens"),
    ("temperature too high", CHAT, chat(temperature=2.1), "temperature"),
    ("temperature below 0", CHAT, chat(temperature=-1), "temperature"),
    ("temperature of a wrong type", CHAT, chat(temperature="hot"), "temperature"),
    ("n too large", CHAT, chat(n=17), "n"),
    ("n 0", TEXT, text(n=0), "n"),
    ("n no integer", TEXT, text(n=1.0), "n"),
    ("top_p 0", TEXT, text(top_p=0), "top_p"),
    ("top_p above 1", TEXT, text(top_p=1.01), "top_p"),
    ("top_k below off", TEXT, text(top_k=-2), "top_k"),
    ("top_k beyond 32 bits", TEXT, text(top_k=2**40), "top_k"),
    ("min_p above 1", TEXT, text(min_p=2), "min_p"),
    ("presence_penalty", CHAT, chat(presence_penalty=2.1), "presence_penalty"),
    ("frequency_penalty", CHAT, chat(frequency_penalty=-2.1), "frequency_penalty"),
    ("repetition_penalty 0", CHAT, chat(repetition_penalty=0), "repetition_penalty"),
    ("repetition_penalty that overflows", CHAT, chat(repetition_penalty=1e-300), "repetition_penalty"),
    ("seed beyond 64 bits", CHAT, chat(seed=2**63), "seed"),
    ("seventeen stops", CHAT, chat(stop=["a"] * 17), "stop"),
    ("an empty stop", CHAT, chat(stop=""), "stop"),
    ("stop an object", CHAT, chat(stop={}), "stop"),
    ("a stop token beyond the vocabulary", CHAT, chat(stop_token_ids=[99999]), "stop_token_ids"),
    ("bias on a token beyond the vocabulary", CHAT, chat(logit_bias={"99999": 1}), "logit_bias"),
    ("bias on a negative token", CHAT, chat(logit_bias={"-1": 1}), "logit_bias"),
    ("bias on a word", CHAT, chat(logit_bias={"word": 1}), "logit_bias"),
    ("bias out of range", CHAT, chat(logit_bias={"5": 101}), "logit_bias"),
    ("bias twice on a token", CHAT, chat(logit_bias={"5": 1, "05": 2}), "logit_bias"),
    ("logprobs of the other API", CHAT, chat(logprobs=5), "logprobs"),
    ("too many logprobs", CHAT, chat(logprobs=True, top_logprobs=21), "top_logprobs"),
    ("top_logprobs alone", CHAT, chat(top_logprobs=1), "top_logprobs"),
    ("too many logprobs", TEXT, text(logprobs=21), "logprobs"),
    ("stream of a wrong type", CHAT, chat(stream="yes"), "stream"),
    ("stream_options without stream", CHAT, chat(stream_options={}), "stream_options"),
    ("unknown stream option", CHAT, chat(stream=True, stream_options={"a": 1}), "stream_options.a"),
    ("an error before a stream", CHAT, chat(stream=True, n=99), "n"),
    ("deep nesting", CHAT, deep(500), "metadata"),
    ("unknown field", CHAT, chat(temprature=1), "temprature"),
    ("unknown field", TEXT, text(messages=USER), "messages"),
    ("unsupported", CHAT, chat(tools=[{"type": "function", "function": {"name": "f"}}]), "tools"),
    ("a choice without tools", CHAT, chat(tool_choice={"type": "custom", "custom": {"name": "f"}}), "tool_choice"),
    ("unsupported", CHAT, chat(functions=[{"name": "f"}]), "functions"),
    ("unknown format", CHAT, chat(response_format={"type": "yaml"}), "response_format"),
    (
        "format without a schema",
        CHAT,
        chat(response_format={"type": "json_schema", "json_schema": {"name": "a"}}),
        "response_format.json_schema.schema",
    ),
    ("unsupported", CHAT, chat(modalities=["text", "audio"]), "modalities"),
    ("unsupported", CHAT, chat(store=True), "store"),
    ("unsupported", CHAT, chat(reasoning_effort="high"), "reasoning_effort"),
    ("fewer than n", TEXT, text(best_of=1, n=2), "best_of"),
    ("best_of in a stream", TEXT, text(best_of=2, stream=True), "best_of"),
    ("unsupported", CHAT, chat(echo=True), "echo"),
    ("unsupported", TEXT, text(suffix="end"), "suffix"),
    ("prompt_logprobs in a stream", TEXT, text(prompt_logprobs=1, stream=True), "prompt_logprobs"),
    ("a text of a wrong type", "/tokenize", {"prompt": 5}, "prompt"),
    ("a token id beyond the vocabulary", "/detokenize", {"tokens": [99999]}, "tokens"),
    ("a negative token id", "/detokenize", {"tokens": [-1]}, "tokens"),
]
RAW: list[tuple[str, bytes]] = [
    ("nothing", b""),
    ("half an object", b'{"model": "tandem-tiny"'),
    ("not quite JSON", b"{'model': 'tandem-tiny'}"),
    ("a list", b"[]"),
    ("null", b"null"),
    ("NaN", b'{"model": "tandem-tiny", "prompt": "a", "temperature": NaN}'),
    ("Infinity", b'{"model": "tandem-tiny", "prompt": "a", "temperature": Infinity}'),
    ("a number beyond a double", b'{"model": "tandem-tiny", "prompt": "a", "temperature": 1e999}'),
    ("an integer of 5,000 digits", b'{"model": "tandem-tiny", "prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}"),
    ("nesting without end", b"[" * 200_000),
    ("nesting without end", b'{"a":' * 100_000),
    ("no UTF-8", b'{"model": "tandem-tiny", "prompt": "\xff"}'),
    ("UTF-16", json.dumps(text()).encode("utf-16")),
    ("a lone surrogate", b'{"model": "tandem-tiny", "prompt": "\\ud800"}'),
    ("an encoded surrogate", b'{"model": "tandem-tiny", "prompt": "\xed\xa0\x80"}'),
    ("a zero byte", b'{"model": "tandem-tiny", "prompt": "a"}\0'),
]


class Client:
    """Sends exactly the given bytes; one connection for all, so that an error must leave it in order."""

    def __init__(self, cluster: Cluster) -> None:
        self.connection = http.client.HTTPConnection(cluster.api.removeprefix("http://"), timeout=60)

    def send(self, method: str, path: str, body: bytes, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        self.connection.request(method, path, body, JSON if headers is None else headers)
        response = self.connection.getresponse()
        return response.status, json.loads(response.read())

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        return self.send("POST", path, json.dumps(body).encode())

    def refused(self, status: int, answer: tuple[int, Any]) -> dict[str, Any]:
        """The error object, after the next good request was served."""
        assert answer[0] == status, answer
        assert list(answer[1]) == ["error"]
        error: dict[str, Any] = answer[1]["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert 0 < len(error["message"]) < 500
        assert "\n" not in error["message"]
        assert self.post(TEXT, text(max_tokens=1))[0] == 200
        return error


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[Client]:
    client = Client(cluster)
    yield client
    client.connection.close()


@pytest.mark.parametrize(("path", "body", "param"), [case[1:] for case in FIELDS], ids=[case[0] for case in FIELDS])
def test_a_wrong_field_is_named(client: Client, path: str, body: dict[str, Any], param: str) -> None:
    assert client.refused(400, client.post(path, body))["param"] == param


@pytest.mark.parametrize("body", [case[1] for case in RAW], ids=[case[0] for case in RAW])
@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_bodies_that_are_no_json_object(client: Client, path: str, body: bytes) -> None:
    error = client.refused(400, client.send("POST", path, body))
    ways = ("is not ", "must be a JSON object", "has too many lists and objects")
    assert error["message"].startswith(tuple(f"the request body {way}" for way in ways))


def test_unknown_models(client: Client) -> None:
    for path, body in ((CHAT, chat()), (TEXT, text()), ("/tokenize", {"prompt": "a"})):
        for name in ("gpt-9", "", "a\nb", "x" * 512):
            error = client.refused(404, client.post(path, {**body, "model": name}))
            assert (error["param"], error["code"]) == ("model", "model_not_found")
        error = client.refused(400, client.post(path, {**body, "model": "x" * 513}))
        assert error["param"] == "model"
        assert "at most 512" in error["message"]
    client.refused(404, client.send("GET", "/v1/models/gpt-9", b""))


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", CHAT, 405),
        ("PUT", TEXT, 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/readyz", 405),
        ("POST", "/v1/embedding", 404),
        ("POST", "/v1/chat/completions/", 404),
        ("GET", "/", 404),
        ("GET", "/v1/%ff%00", 404),
        ("GET", "/admin/v1/status", 404),
    ],
)
def test_wrong_methods_and_paths(client: Client, method: str, path: str, status: int) -> None:
    error = client.refused(status, client.send(method, path, json.dumps(text()).encode() if method != "GET" else b""))
    assert method in error["message"] or "nothing is served at" in error["message"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("content-type", "text/plain"),
        ("content-type", "multipart/form-data; boundary=x"),
        ("content-type", "application/json; charset=utf-16"),
        ("content-encoding", "gzip"),
    ],
)
def test_wrong_content_types(client: Client, name: str, value: str) -> None:
    answer = client.send("POST", TEXT, json.dumps(text()).encode(), {**JSON, name: value})
    assert client.refused(415, answer)["param"] == name


def test_a_body_over_the_limit(client: Client) -> None:
    body = text(prompt="a" * (5 << 20))
    error = client.refused(413, client.post(TEXT, body))
    assert "4194304 bytes" in error["message"]


def test_what_asks_for_nothing_is_accepted(client: Client) -> None:
    more = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "store": False, "n": None}
    assert client.post(CHAT, chat(**more, user="u", metadata={"a": "b"}, service_tier="auto"))[0] == 200
    assert client.post(TEXT, text(best_of=1, echo=False, suffix=None))[0] == 200
    assert client.send("POST", TEXT, json.dumps(text()).encode(), {})[0] == 200


@pytest.mark.parametrize(
    "extreme",
    [
        {"temperature": 1e-300},
        {"temperature": 2, "top_p": 1e-300},
        {"top_k": 2**32 - 1, "temperature": 1e-40},
        {"repetition_penalty": 1e-3},
        {"presence_penalty": -2, "frequency_penalty": -2, "repetition_penalty": 2},
        {"logit_bias": {str(token): 100 for token in range(1024)}},
        {"seed": -(2**63)},
        {"n": 16},
        {"prompt": "\0"},
        {"prompt": "a\u2028\ufffe\U0001f600"},
        {"prompt": ""},
        {"prompt": [4095] * 4088, "max_tokens": 8},
    ],
    ids=str,
)
def test_what_is_just_allowed_is_served(client: Client, extreme: dict[str, Any]) -> None:
    status, answer = client.post(TEXT, text(**{"max_tokens": 8, **extreme}))
    assert status == 200, answer
    assert all(choice["finish_reason"] in ("stop", "length") for choice in answer["choices"])


SAMPLING = i.GenerateSampling
GRPC: list[tuple[str, i.GenerateRequest, str, str]] = [
    ("unknown model", i.GenerateRequest(model="gpt-9", text="a"), "NOT_FOUND", "model"),
    ("a long unknown model", i.GenerateRequest(model="x" * 100_000, text="a"), "NOT_FOUND", "model"),
    ("no prompt", i.GenerateRequest(), "INVALID_ARGUMENT", "prompt"),
    ("empty token ids", i.GenerateRequest(token_ids=i.TokenIds()), "INVALID_ARGUMENT", "prompt"),
    ("empty chat", i.GenerateRequest(chat=i.ChatMessages()), "INVALID_ARGUMENT", "messages"),
    ("unknown role", i.GenerateRequest(chat=i.ChatMessages(messages=[i.ChatMessage(role="é" * 9000, content="a")])),
     "INVALID_ARGUMENT", "messages[0].role"),
    ("prompt too long", i.GenerateRequest(text="word " * 9000), "INVALID_ARGUMENT", "prompt"),
    ("token ids too long", i.GenerateRequest(token_ids=i.TokenIds(ids=[5] * 4096)), "INVALID_ARGUMENT", "prompt"),
    ("token beyond the vocabulary", i.GenerateRequest(token_ids=i.TokenIds(ids=[2**32 - 1])), "INVALID_ARGUMENT",
     "prompt"),
    ("seventeen stops", i.GenerateRequest(text="a", stop=["a"] * 17), "INVALID_ARGUMENT", "stop"),
    *(
        (name, i.GenerateRequest(text="a", sampling=sampling), "INVALID_ARGUMENT", name)
        for name, sampling in (
            ("max_tokens", SAMPLING(max_tokens=2**32 - 1)),
            ("max_tokens", SAMPLING(max_tokens=0)),
            ("n", SAMPLING(n=17)),
            ("temperature", SAMPLING(temperature=float("nan"))),
            ("temperature", SAMPLING(temperature=3)),
            ("top_p", SAMPLING(top_p=float("inf"))),
            ("min_p", SAMPLING(min_p=-1)),
            ("presence_penalty", SAMPLING(presence_penalty=3)),
            ("repetition_penalty", SAMPLING(repetition_penalty=1e-300)),
            ("logprobs", SAMPLING(logprobs=21)),
            ("logit_bias", SAMPLING(logit_bias={4096: 1.0})),
            ("logit_bias", SAMPLING(logit_bias={5: float("nan")})),
            ("stop_token_ids", SAMPLING(stop_token_ids=[4096])),
        )
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def stub(cluster: Cluster) -> Iterator[Any]:
    with grpc.insecure_channel(cluster.context["grpc"]) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


@pytest.mark.parametrize(("request_", "status", "param"), [case[1:] for case in GRPC], ids=[case[0] for case in GRPC])
def test_grpc_names_a_wrong_field(stub: Any, request_: i.GenerateRequest, status: str, param: str) -> None:
    if not request_.model:
        request_.model = "tandem-tiny"
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(request_, timeout=60))
    error: Any = caught.value
    assert error.code().name == status, error.details()
    assert dict(error.trailing_metadata())["tandem-param"] == param
    good = i.GenerateRequest(model="tandem-tiny", text="a", sampling=SAMPLING(max_tokens=1))
    assert list(stub.Generate(good, timeout=60))[-1].finished


def test_grpc_message_over_the_limit(stub: Any) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(i.GenerateRequest(model="tandem-tiny", text="a" * (5 << 20)), timeout=60))
    error: Any = caught.value
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_no_failure_was_the_clusters_own(cluster: Cluster, client: Client) -> None:
    client.refused(400, client.post(TEXT, text(n=0)))
    assert cluster.metric("tandem_requests_total", outcome="internal") == 0
    assert cluster.metric("tandem_requests_total", outcome="invalid_request") > 0
    wait_for(lambda: all(worker["in_flight"] == 0 for worker in cluster.status()["workers"]), what="nothing in flight")
