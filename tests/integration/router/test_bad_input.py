"""Every invalid request gets a 4xx that names its cause; nothing is ignored, and the next request works."""

import socket
from typing import Any

import httpx
import pytest

from tests.integration.router.house import ADMIN_KEY, RouterHarness

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
USER: Any = [{"role": "user", "content": "Hi"}]


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": USER, "max_tokens": 2, **more}


def text(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "Hi", "max_tokens": 2, **more}


def part(kind: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": kind, kind: {"url": "x"}}]}]


CASES: list[tuple[str, dict[str, Any], int, str | None, str]] = [
    # path, body, status, param, code
    (CHAT, chat(model="gpt-9"), 404, "model", "model_not_found"),
    (CHAT, {"messages": USER}, 400, "model", "invalid_request"),
    (CHAT, chat(model=7), 400, "model", "invalid_request"),
    (CHAT, chat(messages=[]), 400, "messages", "invalid_request"),
    (CHAT, chat(messages="Hi"), 400, "messages", "invalid_request"),
    (CHAT, chat(messages=[{"role": "wizard", "content": "Hi"}]), 400, "messages[0].role", "invalid_request"),
    (CHAT, chat(messages=[{"role": "user"}]), 400, "messages[0].content", "invalid_request"),
    (CHAT, chat(messages=[{"role": "user", "content": 3}]), 400, "messages[0].content", "invalid_request"),
    (CHAT, chat(messages=[{"role": "function", "content": "x"}]), 400, "messages[0].role", "unsupported_parameter"),
    (CHAT, chat(messages=part("image_url")), 400, "messages[0].content[1].type", "unsupported_parameter"),
    (CHAT, chat(messages=part("input_audio")), 400, "messages[0].content[1].type", "unsupported_parameter"),
    (CHAT, chat(max_tokens="many"), 400, "max_tokens", "invalid_request"),
    (CHAT, chat(max_tokens=0), 400, "max_tokens", "invalid_request"),
    (CHAT, chat(max_tokens=True), 400, "max_tokens", "invalid_request"),
    (CHAT, chat(max_tokens=1.5), 400, "max_tokens", "invalid_request"),
    (CHAT, chat(max_tokens=5000), 400, "max_tokens", "context_length_exceeded"),
    (CHAT, chat(max_tokens=2**62), 400, "max_tokens", "context_length_exceeded"),
    (CHAT, chat(max_tokens=2**70), 400, "max_tokens", "invalid_request"),
    (CHAT, chat(max_tokens=3, max_completion_tokens=4), 400, "max_completion_tokens", "invalid_request"),
    (CHAT, {"model": "tiny", "messages": USER, "max_completion_tokens": 9000}, 400, "max_completion_tokens",
     "context_length_exceeded"),
    (CHAT, chat(messages=[{"role": "user", "content": "word " * 9000}]), 400, "messages", "context_length_exceeded"),
    (CHAT, chat(temperature=2.5), 400, "temperature", "invalid_request"),
    (CHAT, chat(temperature=-0.1), 400, "temperature", "invalid_request"),
    (CHAT, chat(temperature="hot"), 400, "temperature", "invalid_request"),
    (CHAT, chat(top_p=0), 400, "top_p", "invalid_request"),
    (CHAT, chat(n=0), 400, "n", "invalid_request"),
    (CHAT, chat(n=1000), 400, "n", "invalid_request"),
    (CHAT, chat(presence_penalty=3), 400, "presence_penalty", "invalid_request"),
    (CHAT, chat(frequency_penalty=-3), 400, "frequency_penalty", "invalid_request"),
    (CHAT, chat(repetition_penalty=0), 400, "repetition_penalty", "invalid_request"),
    (CHAT, chat(min_p=1.5), 400, "min_p", "invalid_request"),
    (CHAT, chat(top_k=-5), 400, "top_k", "invalid_request"),
    (CHAT, chat(top_k=2**40), 400, "top_k", "invalid_request"),
    (CHAT, chat(repetition_penalty=1e-300), 400, "repetition_penalty", "invalid_request"),
    (CHAT, chat(seed=2**64), 400, "seed", "invalid_request"),
    (CHAT, chat(stop=[str(i) for i in range(17)]), 400, "stop", "invalid_request"),
    (CHAT, chat(min_tokens=3), 400, "min_tokens", "invalid_request"),
    (CHAT, chat(min_tokens=-1), 400, "min_tokens", "invalid_request"),
    (TEXT, {"model": "tiny", "prompt": "a", "min_tokens": 17}, 400, "min_tokens", "invalid_request"),
    (CHAT, chat(bad_words="word"), 400, "bad_words", "invalid_request"),
    (CHAT, chat(bad_words=["a", ""]), 400, "bad_words", "invalid_request"),
    (CHAT, chat(bad_words=["a"] * 257), 400, "bad_words", "invalid_request"),
    (CHAT, chat(bad_words=["é" * 257]), 400, "bad_words", "invalid_request"),
    (CHAT, chat(allowed_token_ids=[]), 400, "allowed_token_ids", "invalid_request"),
    (CHAT, chat(allowed_token_ids=[5, 99999]), 400, "allowed_token_ids", "invalid_request"),
    (CHAT, chat(include_stop_str_in_output=1), 400, "include_stop_str_in_output", "invalid_request"),
    (CHAT, chat(stop=[""]), 400, "stop", "invalid_request"),
    (CHAT, chat(stop=5), 400, "stop", "invalid_request"),
    (CHAT, chat(stop={"a": 1}), 400, "stop", "invalid_request"),
    (CHAT, chat(stop_token_ids=[99999]), 400, "stop_token_ids", "invalid_request"),
    (CHAT, chat(logit_bias={"99999": 1}), 400, "logit_bias", "invalid_request"),
    (CHAT, chat(logit_bias={"word": 1}), 400, "logit_bias", "invalid_request"),
    (CHAT, chat(logit_bias={"05": 1, "5": 2}), 400, "logit_bias", "invalid_request"),
    (CHAT, chat(logit_bias={"5": 101}), 400, "logit_bias", "invalid_request"),
    (CHAT, chat(logprobs=5), 400, "logprobs", "invalid_request"),
    (CHAT, chat(top_logprobs=2), 400, "top_logprobs", "invalid_request"),
    (CHAT, chat(logprobs=True, top_logprobs=21), 400, "top_logprobs", "invalid_request"),
    (CHAT, {**chat(logprobs=True, top_logprobs=20, n=16), "max_tokens": 2000}, 400, "top_logprobs", "invalid_request"),
    (TEXT, {**text(logprobs=20, best_of=16), "max_tokens": 2000}, 400, "logprobs", "invalid_request"),
    (TEXT, {**text(logprobs=20), "prompt": ["a"] * 32, "max_tokens": 1000}, 400, "logprobs", "invalid_request"),
    (CHAT, chat(user="u" * 513), 400, "user", "invalid_request"),
    (CHAT, chat(safety_identifier="u" * 65), 400, "safety_identifier", "invalid_request"),
    (CHAT, chat(messages=[{**USER[0], "name": "n" * 513}]), 400, "messages[0].name", "invalid_request"),
    (CHAT, chat(messages=[{**USER[0], "reasoning": "Hm"}]), 400, "messages[0].reasoning", "invalid_request"),
    (CHAT, chat(messages=[{"role": "assistant", "refusal": None}]), 400, "messages[0].content", "invalid_request"),
    (CHAT, chat(messages=[*USER, {"role": "assistant", "content": "a", "reasoning_content": ["b"]}]), 400,
     "messages[1].reasoning_content", "invalid_request"),
    (CHAT, chat(messages=[*USER, {"role": "assistant", "content": [{"type": "refusal"}]}]), 400,
     "messages[1].content[0].refusal", "invalid_request"),
    ("/tokenize", {"messages": [{"role": "user", "content": [{"type": "refusal", "refusal": "No"}]}]}, 400,
     "messages[0].content[0].type", "invalid_request"),
    *((CHAT, chat(messages=[*USER, {"role": "assistant", "content": "a", name: value}]), 400, f"messages[1].{name}",
       "unsupported_parameter") for name, value in {
           "function_call": {"name": "f"}, "audio": {"id": "a"},
           "reasoning_details": [{"type": "reasoning.text"}], "thinking_blocks": [{"type": "thinking"}],
       }.items()),
    (CHAT, chat(stream="yes"), 400, "stream", "invalid_request"),
    (CHAT, chat(stream_options={"include_usage": True}), 400, "stream_options", "invalid_request"),
    (CHAT, chat(stream=True, stream_options={"every": 1}), 400, "stream_options.every", "invalid_request"),
    (CHAT, chat(temprature=1), 400, "temprature", "invalid_request"),
    (CHAT, chat(tools=[{"type": "function", "function": {"name": "f"}}]), 400, "tools", "unsupported_parameter"),
    (CHAT, chat(tool_choice="required"), 400, "tool_choice", "invalid_request"),
    (CHAT, chat(functions=[{"name": "f"}]), 400, "functions", "unsupported_parameter"),
    (CHAT, chat(response_format={"type": "yaml"}), 400, "response_format", "invalid_request"),
    (CHAT, chat(modalities=["audio"]), 400, "modalities", "unsupported_parameter"),
    (CHAT, chat(audio={"voice": "x"}), 400, "audio", "unsupported_parameter"),
    (CHAT, chat(store=True), 400, "store", "unsupported_parameter"),
    (CHAT, chat(prediction={"type": "content"}), 400, "prediction.content", "invalid_request"),
    (CHAT, chat(prediction="text"), 400, "prediction", "invalid_request"),
    (CHAT, chat(prediction={"type": "file", "content": "a"}), 400, "prediction.type", "invalid_request"),
    (CHAT, chat(prediction={"type": "content", "content": "a b " * 140_000}), 400, "prediction", "invalid_request"),
    (CHAT, chat(prediction={"type": "content", "content": "a b " * 9_000}), 400, "prediction", "invalid_request"),
    (CHAT, chat(speculative="no"), 400, "speculative", "invalid_request"),
    (CHAT, chat(reasoning_effort="high"), 400, "reasoning_effort", "unsupported_parameter"),
    (CHAT, chat(service_tier="priority"), 400, "service_tier", "invalid_request"),
    (TEXT, text(model="gpt-9"), 404, "model", "model_not_found"),
    (TEXT, {"model": "tiny"}, 400, "prompt", "invalid_request"),
    (TEXT, text(prompt=5), 400, "prompt", "invalid_request"),
    (TEXT, text(prompt={}), 400, "prompt", "invalid_request"),
    (TEXT, text(prompt=[]), 400, "prompt", "invalid_request"),
    (TEXT, text(prompt=[[]]), 400, "prompt", "invalid_request"),
    (TEXT, text(prompt=["a"] * 100), 400, "prompt", "invalid_request"),
    (TEXT, text(prompt=[1, 99999]), 400, "prompt", "invalid_request"),
    (TEXT, text(prompt=[1, -1]), 400, "prompt", "invalid_request"),
    (TEXT, text(prompt=[5] * 5000), 400, "prompt", "context_length_exceeded"),
    (TEXT, text(max_tokens=4096), 400, "max_tokens", "context_length_exceeded"),
    (TEXT, text(logprobs=21), 400, "logprobs", "invalid_request"),
    (TEXT, text(best_of=1, n=2), 400, "best_of", "invalid_request"),
    (TEXT, text(best_of=17), 400, "best_of", "invalid_request"),
    (TEXT, text(best_of=2, n=0), 400, "n", "invalid_request"),
    (TEXT, text(best_of=2, stream=True), 400, "best_of", "invalid_request"),
    (CHAT, chat(best_of=2), 400, "best_of", "unsupported_parameter"),
    (TEXT, text(suffix="end"), 400, "suffix", "unsupported_parameter"),
    (TEXT, text(echo=1), 400, "echo", "invalid_request"),
    (TEXT, text(max_tokens=0), 400, "max_tokens", "invalid_request"),
    (CHAT, chat(echo=True), 400, "echo", "unsupported_parameter"),
    (TEXT, text(prompt_logprobs=21), 400, "prompt_logprobs", "invalid_request"),
    (CHAT, chat(prompt_logprobs=-1), 400, "prompt_logprobs", "invalid_request"),
    (CHAT, chat(prompt_logprobs=1, stream=True), 400, "prompt_logprobs", "invalid_request"),
    (TEXT, text(prompt=[5] * 4000, prompt_logprobs=20, n=4), 400, "prompt_logprobs", "invalid_request"),
    (TEXT, text(prompt=[5] * 4000, echo=True, logprobs=20, n=4), 400, "logprobs", "invalid_request"),
    (TEXT, text(return_token_ids="yes"), 400, "return_token_ids", "invalid_request"),
    (TEXT, text(messages=USER), 400, "messages", "invalid_request"),
    ("/tokenize", {"prompt": 5}, 400, "prompt", "invalid_request"),
    ("/tokenize", {}, 400, "prompt", "invalid_request"),
    ("/tokenize", {"model": "gpt-9", "prompt": "a"}, 404, "model", "model_not_found"),
    ("/detokenize", {"tokens": [99999]}, 400, "tokens", "invalid_request"),
    ("/detokenize", {"tokens": ["a"]}, 400, "tokens[0]", "invalid_request"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "status", "param", "code"), CASES)
def test_refused_by_name(
    shared: RouterHarness, path: str, body: Any, status: int, param: str | None, code: str
) -> None:
    answer = httpx.post(shared.url + path, json=body)
    assert_error(answer, status, code)
    assert answer.json()["error"]["param"] == param
    assert_next_works(shared)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1, 2]", b"null", b'"text"', b'{"model": NaN}', b"\xff\xfe", b'{"a": "\\ud800"}', b"[" * 100_000],
)
def test_not_json(shared: RouterHarness, body: bytes) -> None:
    assert_error(httpx.post(shared.url + CHAT, content=body), 400, "invalid_request")
    assert_next_works(shared)


@pytest.mark.parametrize("name", ["x" * 100_000, "é\0", ""])
def test_long_and_odd_names_are_repeated_in_short(shared: RouterHarness, name: str) -> None:
    for body in (chat(**{name: 1}), chat(model=name), chat(logit_bias={name: 1})):
        answer = httpx.post(shared.url + CHAT, json=body)
        assert answer.status_code in (400, 404)
        assert len(answer.content) < 1000
    assert_next_works(shared)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("content-type", "text/plain"),
        ("content-type", "application/x-www-form-urlencoded"),
        ("content-type", "application/json; charset=latin-1"),
        ("content-encoding", "gzip"),
    ],
)
def test_bodies_in_another_form(shared: RouterHarness, name: str, value: str) -> None:
    answer = httpx.post(shared.url + CHAT, json=chat(), headers={name: value})
    assert_error(answer, 415, "unsupported_media_type")
    assert answer.json()["error"]["param"] == name
    for good in ("application/json; charset=UTF-8", "Application/JSON"):
        assert httpx.post(shared.url + CHAT, json=chat(), headers={"content-type": good}).status_code == 200


def test_body_over_the_limit(shared: RouterHarness) -> None:
    limit = shared.config.settings.max_body_bytes
    declared = httpx.post(shared.url + CHAT, content=b'{"model": "' + b"x" * limit)
    assert_error(declared, 413, "request_too_large")

    def parts() -> Any:
        for _ in range(limit // 65536 + 2):
            yield b" " * 65536

    assert_error(httpx.post(shared.url + CHAT, content=parts()), 413, "request_too_large")
    assert_next_works(shared)


def test_huge_declared_body_is_refused_unread(shared: RouterHarness) -> None:
    with socket.create_connection(("127.0.0.1", shared.ports["http"]), timeout=10) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999999999\r\n\r\n{")
        assert raw.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_unknown_paths_and_methods(shared: RouterHarness) -> None:
    assert_error(httpx.get(f"{shared.url}/v1/nothing", headers={"host": "["}), 404, "invalid_request")
    assert len(httpx.get(f"{shared.url}/{'x' * 9000}").content) < 1000
    assert_error(httpx.get(f"{shared.url}/v1/nothing"), 404, "invalid_request")
    assert_error(httpx.get(shared.url + CHAT), 405, "invalid_request")
    assert_error(httpx.post(f"{shared.url}{CHAT}/", json=chat()), 404, "invalid_request")
    assert_error(httpx.delete(f"{shared.url}/v1/models"), 405, "invalid_request")
    assert_error(httpx.get(f"{shared.url}/v1/models/gpt-9"), 404, "model_not_found")


def test_harmless_parameters_are_accepted(shared: RouterHarness) -> None:
    more = {
        "user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "tools": [], "tool_choice": "none",
        "response_format": {"type": "text"}, "parallel_tool_calls": True, "n": None, "stop": None, "logprobs": None,
        "modalities": ["text"], "reasoning_effort": None, "top_k": -1, "stream": True, "stream_options": {},
    }  # fmt: skip
    assert httpx.post(shared.url + CHAT, json=chat(**more)).status_code == 200
    assert httpx.post(shared.url + TEXT, json=text(best_of=1, echo=False, suffix=None)).status_code == 200


def test_prompt_that_just_fits(shared: RouterHarness) -> None:
    room = httpx.post(shared.url + TEXT, json=text(prompt=[5] * 4090, max_tokens=6))
    assert room.status_code == 200
    rest = httpx.post(shared.url + TEXT, json={"model": "tiny", "prompt": [5] * 4090})
    assert rest.json()["usage"]["completion_tokens"] == 6


def test_error_counts_in_metrics(shared: RouterHarness) -> None:
    name = 'tandem_requests_total{api="chat",outcome="model_not_found"}'
    before = shared.metric(name)
    httpx.post(shared.url + CHAT, json=chat(model="no"))
    assert shared.metric(name) == before + 1


def test_admin_needs_the_key(shared: RouterHarness) -> None:
    url = f"{shared.admin_url}/admin/v1/status"
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {ADMIN_KEY}"}):
        assert_error(httpx.get(url, headers=headers), 401, "invalid_api_key")
    assert httpx.get(url, headers={"authorization": f"Bearer {ADMIN_KEY}"}).status_code == 200
    assert_error(httpx.get(f"{shared.admin_url}/nothing"), 404, "invalid_request")
    assert httpx.get(f"{shared.admin_url}/metrics").status_code == 200


def test_admin_down_and_requests(shared: RouterHarness) -> None:
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    before = shared.downs
    assert httpx.post(f"{shared.admin_url}/admin/v1/down", headers=headers).status_code == 202
    assert shared.downs == before + 1
    assert httpx.get(f"{shared.admin_url}/admin/v1/requests", headers=headers).json() == {"requests": []}


def assert_error(answer: httpx.Response, status: int, code: str) -> None:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code, error
    assert error["message"]
    assert answer.headers["content-type"] == "application/json"


def assert_next_works(house: RouterHarness) -> None:
    assert httpx.post(house.url + TEXT, json=text()).status_code == 200
