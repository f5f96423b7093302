"""Every invalid request to the Messages API gets a 4xx of Anthropic's shape, soon, and the next request works."""

import threading
from typing import Any

import httpx
import pytest

from tandem.router.api.http import body_parser
from tests.integration.router.house import Build, RouterHarness
from tests.integration.router.messages import HELLO, assert_error
from tests.integration.router.scripted_worker import Script
from tools.waiting import wait_for

PATHS = ("/v1/messages", "/v1/messages/count_tokens")
START = b'{"model":"tiny","messages":[{"role":"user","content":"hi"}],'
BODY_BYTES = 4 << 20


def body(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [HELLO], "max_tokens": 2, **more}


def said(*blocks: Any, role: str = "user") -> list[dict[str, Any]]:
    return [HELLO, {"role": role, "content": [*blocks]}]


def text(said: Any, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **more}


USE = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
CASES: list[tuple[dict[str, Any], str]] = [
    # what is wrong, and a part of the message that names it
    ({"messages": None}, "messages"),
    ({"messages": {}}, "messages"),
    ({"messages": [5]}, "messages[0]"),
    ({"messages": [HELLO] * 8193}, "messages has 8193 entries"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "a", "name": "b"}]}, "messages[0].name"),
    ({"messages": said(text(5))}, "messages[1].content[0].text"),
    ({"messages": said("a")}, "messages[1].content[0]"),
    ({"messages": said(text("a"), {"type": "text"})}, "messages[1].content[1].text"),
    ({"messages": said(text("a", citations=[{}]))}, "messages[1].content[0].citations"),
    ({"messages": said(*[text("")] * 1025)}, "messages[1].content has 1025 entries"),
    ({"messages": said({"type": "image", "source": {}})}, "messages[1].content[0].type is 'image'"),
    ({"messages": said({"type": {}, "text": "a"})}, "messages[1].content[0].type"),
    ({"messages": said({"type": "x" * 5000})}, "messages[1].content[0].type"),
    ({"messages": said(USE)}, "messages[1].content[0] is of type tool_use"),
    ({"messages": said({**USE, "input": "{}"}, role="assistant")}, "messages[1].content[0].input"),
    ({"messages": said({**USE, "id": "i" * 513}, role="assistant")}, "messages[1].content[0].id"),
    ({"messages": said({"type": "thinking", "thinking": ["a"]}, role="assistant")}, "messages[1].content[0].thinking"),
    ({"messages": said({"type": "tool_result", "tool_use_id": 5})}, "messages[1].content[0].tool_use_id"),
    (
        {"messages": said({"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]})},
        "messages[1].content[0].content[0].type is 'image'",
    ),
    ({"system": 5}, "system"),
    ({"system": [{"type": "image"}]}, "system[0].type"),
    ({"system": [text("a", cache_control={str(n): "x" for n in range(9)})]}, "system[0].cache_control"),
    ({"cache_control": "ephemeral"}, "cache_control"),
    ({"thinking": {"type": "sometimes"}}, "thinking.type"),
    ({"thinking": True}, "thinking"),
    ({"tools": {}}, "tools"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": [{"name": "f", "input_schema": []}]}, "tools[0].input_schema"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type is 'bash_20250124'"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"output_config": {"format": {"type": "json_object"}}}, "output_config.format.type"),
    ({"mcp_servers": [{}]}, "mcp_servers is not supported"),
    ({"n": 2}, "unknown parameter 'n'"),
]
GENERATION_CASES: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 2**63}, "max_tokens"),
    ({"max_tokens": None}, "max_tokens"),
    ({"stop_sequences": "a"}, "stop_sequences"),
    ({"stop_sequences": ["a"] * 17}, "stop_sequences has 17 entries"),
    ({"stop_sequences": ["a" * 1025]}, "stop_sequences[0]"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "0"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"stream": "yes"}, "stream"),
    ({"metadata": {"user_id": "u" * 513}}, "metadata.user_id"),
    ({"service_tier": "priority"}, "service_tier"),
]


def test_a_thread_is_refused_so_that_the_sdk_goes_on_without(shared: RouterHarness) -> None:
    answer = httpx.post(shared.url + PATHS[0], json=body(thread={"type": "create"}))
    assert answer.status_code == 400
    details = answer.json()["error"]["details"]
    assert details == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    other = httpx.post(shared.url + PATHS[0], json=body(container="c"))
    assert "details" not in other.json()["error"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("wrong", "named"), CASES)
def test_what_is_wrong_is_named(shared: RouterHarness, path: str, wrong: dict[str, Any], named: str) -> None:
    whole = {name: value for name, value in body(**wrong).items() if path == PATHS[0] or name != "max_tokens"}
    answer = httpx.post(shared.url + path, json=whole)
    assert_error(answer, 400, "invalid_request_error")
    assert named in answer.json()["error"]["message"]
    assert len(answer.content) < 1000
    assert_next_works(shared)


@pytest.mark.parametrize(("wrong", "named"), GENERATION_CASES)
def test_what_is_wrong_in_a_generation_is_named(shared: RouterHarness, wrong: dict[str, Any], named: str) -> None:
    answer = httpx.post(shared.url + PATHS[0], json=body(**wrong))
    assert_error(answer, 400, "invalid_request_error")
    assert named in answer.json()["error"]["message"]
    assert_next_works(shared)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[1, 2]", b"null", b'{"model": NaN}', b"\xff\xfe", b'{"a": "\\ud800"}', b"[" * 100_000],
)
def test_not_json(shared: RouterHarness, path: str, raw: bytes) -> None:
    assert_error(httpx.post(shared.url + path, content=raw), 400, "invalid_request_error")
    assert_next_works(shared)


def filled(start: bytes, element: bytes, end: bytes) -> bytes:
    """A body of 4 MiB: a list of as many elements as fit."""
    count = (BODY_BYTES - len(start) - len(end)) // (len(element) + 1)
    return start + b",".join([element] * count) + end


DEEP = b"[" * 50_000 + b"]" * 50_000
HOSTILE = {
    "messages of nothing": filled(b'{"model":"tiny","messages":[', b"{}", b"]}"),
    "messages": filled(b'{"model":"tiny","messages":[', b'{"role":"user","content":"a"}', b"]}"),
    "blocks": filled(b'{"model":"tiny","messages":[{"role":"user","content":[', b'{"type":"text"}', b"]}]}"),
    "results": filled(
        b'{"model":"tiny","messages":[{"role":"user","content":[{"type":"tool_result","content":[', b"1", b"]}]}]}"
    ),
    "system": filled(START + b'"system":[', b"{}", b"]}"),
    "tools": filled(START + b'"tools":[', b"{}", b"]}"),
    "schema": filled(START + b'"tools":[{"name":"f","input_schema":{"enum":[', b"[]", b"]}}]}"),
    "cache_control": filled(START + b'"cache_control":{"a":[', b"1", b"]}}"),
    "stop_sequences": filled(START + b'"stop_sequences":[', b"[]", b"]}"),
    "a deep schema": START + b'"tools":[{"name":"f","input_schema":{"a":' + DEEP + b"}}]}",
    "a deep input": START + b'"messages":[{"role":"assistant","content":[{"type":"tool_use","input":' + DEEP + b"}]}]}",
    "names": START + b",".join(b'"x%d":0' % n for n in range(300_000)) + b"}",
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bodies_are_read_beside_the_event_loop(
    shared: RouterHarness, path: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    parse = body_parser._parsed

    def parsed(*arguments: Any) -> Any:
        threads.append(threading.current_thread().name)
        return parse(*arguments)

    monkeypatch.setattr(body_parser, "_parsed", parsed)
    raw = HOSTILE[name]
    answer = httpx.post(shared.url + path, content=raw, timeout=60)
    assert_error(answer, 400, "invalid_request_error")
    assert len(answer.content) < 1000
    assert [name == "router" for name in threads] == [len(raw) < body_parser.LONG_BODY_BYTES]
    assert_next_works(shared)


def test_a_prompt_that_is_longer_than_any_context(shared: RouterHarness) -> None:
    long = {"model": "tiny", "messages": [{"role": "user", "content": "word " * 100_000}]}
    refused = httpx.post(shared.url + PATHS[0], json={**long, "max_tokens": 1}, timeout=60)
    assert_error(refused, 400, "invalid_request_error")
    counted = httpx.post(shared.url + PATHS[1], json=long, timeout=60)
    assert counted.json()["input_tokens"] > 100_000


@pytest.mark.parametrize("path", PATHS)
def test_a_body_over_the_limit(shared: RouterHarness, path: str) -> None:
    limit = shared.config.settings.max_body_bytes
    assert_error(httpx.post(shared.url + path, content=b'{"model": "' + b"x" * limit), 413, "request_too_large")
    assert_next_works(shared)


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("content-type", "text/plain", 415),
        ("content-encoding", "gzip", 415),
        ("x-slo-class", "none", 400),
    ],
)
def test_wrong_headers(shared: RouterHarness, name: str, value: str, status: int) -> None:
    answer = httpx.post(shared.url + PATHS[0], json=body(), headers={name: value})
    assert_error(answer, status, "invalid_request_error")


def test_other_methods_and_paths(shared: RouterHarness) -> None:
    assert_error(httpx.get(shared.url + PATHS[0]), 405, "invalid_request_error")
    for path in ("/v1/messages/batches", "/v1/messages/batches/b/results", "/v1/messages/nothing"):
        assert_error(httpx.post(shared.url + path, json=body()), 404, "not_found_error")


def test_a_router_that_stops_says_so_in_the_same_shape(build: Build) -> None:
    house = build(script=Script(step_s=0.02))
    house.wait_ready()
    with httpx.stream("POST", house.url + PATHS[0], json=body(max_tokens=60, stream=True)) as stream:
        events = stream.iter_lines()
        assert next(events) == "event: message_start"
        house.loop.call_soon_threadsafe(house.router.stop)
        wait_for(lambda: httpx.get(f"{house.url}/readyz").status_code == 503)
        assert_error(httpx.post(house.url + PATHS[0], json=body()), 503, "overloaded_error")
        assert "event: message_stop" in list(events)


def assert_next_works(house: RouterHarness) -> None:
    assert httpx.post(house.url + PATHS[0], json=body()).status_code == 200
