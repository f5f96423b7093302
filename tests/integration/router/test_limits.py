"""Long, large or cross-origin work: done beside the event loop, bounded, or refused."""

import json
import threading
from dataclasses import replace
from typing import Any

import httpx
import pytest

from tandem.router.api.http import app, body_parser
from tandem.router.api.http.openapi import document
from tandem.router.dispatch import readiness
from tandem.router.dispatch.inflight_request import GenerationRequest
from tandem.router.serving.request_parser import MAX_ANSWER_SCORES, MAX_MESSAGES
from tandem.router.tokenization.tokenizer import LONG_TOKENS
from tests.integration.router.house import ADMIN_KEY, Build, RouterHarness
from tests.integration.router.scripted_worker import Script

KEY = {"authorization": f"Bearer {ADMIN_KEY}"}
TEXT: dict[str, Any] = {"model": "tiny", "prompt": "Hi", "max_tokens": 2}
JSON = json.dumps(TEXT).encode()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"sec-fetch-site": "cross-site"}, 415),
        ({"sec-fetch-site": "same-site", "origin": "http://localhost:3000"}, 415),
        ({"origin": "https://elsewhere.example"}, 415),
        ({"origin": "null"}, 415),
        ({"sec-fetch-site": "same-origin"}, 200),
        ({"sec-fetch-site": "none"}, 200),
        ({"sec-fetch-site": "cross-site", "content-type": "application/json"}, 200),  # a browser asked before
    ],
)
def test_pages_of_another_origin_have_to_say_that_they_send_json(
    shared: RouterHarness, headers: dict[str, str], status: int
) -> None:
    answer = httpx.post(f"{shared.url}/v1/completions", content=JSON, headers=headers)
    assert answer.status_code == status
    own = {"origin": shared.url}
    assert httpx.post(f"{shared.url}/v1/completions", content=JSON, headers=own).status_code == 200


def test_pages_of_another_origin_upload_no_files(keeping: RouterHarness) -> None:
    form: Any = {"files": {"file": ("x", b"{}")}, "data": {"purpose": "batch"}}
    refused = httpx.post(f"{keeping.url}/v1/files", headers={"origin": "https://elsewhere.example"}, **form)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "insufficient_permissions")
    assert httpx.get(f"{keeping.url}/v1/files").json()["data"] == []
    whole = httpx.post(f"{keeping.url}/v1/files", **form)
    assert whole.status_code == 200
    httpx.delete(f"{keeping.url}/v1/files/{whole.json()['id']}")


@pytest.mark.parametrize(("path", "name"), [("/v1/chat/completions", "messages"), ("/tokenize", "messages")])
def test_more_messages_than_anybody_writes_are_refused(shared: RouterHarness, path: str, name: str) -> None:
    many = [{"role": "user", "content": ""}] * (MAX_MESSAGES + 1)
    answer = httpx.post(shared.url + path, json={"model": "tiny", name: many})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
    assert "at most 8192" in answer.json()["error"]["message"]


class Places:
    """The threads that were in a function."""

    def __init__(self) -> None:
        self.threads: list[str] = []

    def around(self, function: Any) -> Any:
        def run(*arguments: Any, **more: Any) -> Any:
            self.threads.append(threading.current_thread().name)
            return function(*arguments, **more)

        return run


def test_long_bodies_are_read_and_many_tokens_written_beside_the_event_loop(
    shared: RouterHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, written = Places(), Places()
    monkeypatch.setattr(body_parser, "_parsed", read.around(body_parser._parsed))
    tokenizer = shared.router.frontend.models.find("tiny").tokenizer
    few, many = [5] * 10, [5, 6, 7, 300] * 40_000
    texts = []
    for tokens in (few, many):
        answer = httpx.post(f"{shared.url}/detokenize", json={"tokens": tokens}, timeout=30)
        texts.append(answer.json()["prompt"])
    assert texts == [tokenizer.decode_all(few), tokenizer.decode_all(many)]
    assert read.threads[0] == "router"
    assert read.threads[1] != "router"
    monkeypatch.setattr(tokenizer, "_run", written.around(tokenizer._run))
    for tokens in (few, [5] * LONG_TOKENS):
        httpx.post(f"{shared.url}/detokenize", json={"tokens": tokens})
    assert len(written.threads) == 1, "the long one went to the thread of the tokeniser"


def test_short_messages_count_as_more_than_their_texts(shared: RouterHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    written, tokenizer = Places(), shared.router.frontend.models.find("tiny").tokenizer
    monkeypatch.setattr(tokenizer, "_run", written.around(tokenizer._run))
    for count in (1, 200):
        messages = [{"role": "user", "content": "a"}] * count
        assert httpx.post(f"{shared.url}/tokenize", json={"messages": messages}).status_code == 200
    assert len(written.threads) == 1


@pytest.mark.parametrize("tokens", [[1, True], [1, "2"], [[1]], "1", [1.5], [None]])
def test_what_is_no_list_of_tokens_is_named(shared: RouterHarness, tokens: Any) -> None:
    answer = httpx.post(f"{shared.url}/detokenize", json={"tokens": tokens})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")
    assert httpx.post(f"{shared.url}/detokenize", json={"tokens": []}).json() == {"prompt": ""}
    assert httpx.post(f"{shared.url}/detokenize", json={"tokens": [2**63]}).status_code == 400


@pytest.mark.parametrize("prompt", [[[1], [True]], [[1], "a"], [[1], 2], [[[1]]], [[1], [1.5]]])
def test_what_is_no_list_of_prompts_is_named(shared: RouterHarness, prompt: Any) -> None:
    answer = httpx.post(f"{shared.url}/v1/completions", json={**TEXT, "prompt": prompt})
    assert (answer.status_code, answer.json()["error"]["param"].partition("[")[0]) == (400, "prompt")


def test_the_document_is_made_once_for_what_it_tells(shared: RouterHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    first = httpx.get(f"{shared.url}/openapi.json").content
    made = Places()
    monkeypatch.setattr(app, "document", made.around(document))
    assert httpx.get(f"{shared.url}/openapi.json").content == first
    assert made.threads == []
    httpx.post(f"{shared.admin_url}/admin/v1/slo", json={"slo": "late", "ttft_s": 60.0}, headers=KEY)
    assert b'"late"' in httpx.get(f"{shared.url}/openapi.json").content
    assert len(made.threads) == 1
    assert made.threads != ["router"]


def test_the_admin_port_bounds_what_it_reads(shared: RouterHarness) -> None:
    long = {"prompt": [5] * 100_000}  # no longer than a request may be: it is refused for what it is
    answer = httpx.post(f"{shared.admin_url}/admin/v1/route/explain", json=long, headers=KEY)
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    limit = shared.config.settings.max_body_bytes
    for path, size in (("route/explain", limit), ("route/policy", 1 << 16), ("kv/repair", 10_000 << 10)):
        answer = httpx.post(f"{shared.admin_url}/admin/v1/{path}", content=b" " * (size + 1), headers=KEY)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
        assert httpx.post(f"{shared.admin_url}/admin/v1/{path}", content=b" " * 9, headers=KEY).status_code == 400


def test_a_strange_host_is_no_failure_of_the_admin_port(shared: RouterHarness) -> None:
    answer = httpx.get(f"{shared.admin_url}/admin/v1/nothing", headers={"host": "["})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "invalid_request")


def test_a_router_that_stops_does_not_wait_for_its_own_probes(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "PROBE_S", 3600.0)
    house = build(drain_s=3600.0)
    house.wait_ready()
    house.workers["decode-0"].script = Script(stall_at=0)
    house.restart_worker("decode-0")
    house.wait(lambda: bool(house.router.dispatcher.flights))
    house.stop()  # it waits half a minute for that


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"user": "u" * 513}, "user"),
        ({"safety_identifier": "s" * 65}, "safety_identifier"),
        ({"input": [{"role": "user", "content": "Hi", "id": "i" * 65}]}, "input[0].id"),
        ({"prompt_cache_key": "k" * 513}, "prompt_cache_key"),
    ],
)
def test_what_is_told_again_in_a_stored_response_has_a_length(
    keeping: RouterHarness, more: dict[str, Any], param: str
) -> None:
    body = {"model": "tiny", "input": "Hi", "max_output_tokens": 1, **more}
    answer = httpx.post(f"{keeping.url}/v1/responses", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_without_a_limit_an_answer_is_as_long_as_its_log_probabilities_may_be(shared: RouterHarness) -> None:
    ask = GenerationRequest(
        api="chat",
        served_model="tiny",
        messages=({"role": "user", "content": "Hi"},),
        options={"n": 16, "logprobs": 20},
    )

    def tokens(**more: Any) -> int:
        (work,) = shared.call(shared.router.frontend.reader.read(replace(ask, **more)))
        return int(work.sampling.max_tokens)

    assert tokens(is_whole=True) == MAX_ANSWER_SCORES // 16 // 21
    assert tokens() > 4000
    assert tokens(is_whole=True, options={"n": 16}) == tokens()
