"""Handling of parameters in the HTTP and gRPC APIs that no engine receives."""

import json
from dataclasses import replace
from typing import Any

import grpc
import httpx
import pytest

from tandem.router.tokenization.tokenizer import Tokenizer
from tandem.rpc.v1 import inference_pb2 as i
from tandem.rpc.v1 import inference_pb2_grpc as i_grpc
from tests.integration.router.house import MODEL, TINY, Build, RouterHarness

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
USER: Any = [{"role": "user", "content": "Hi"}]
START = [*USER, {"role": "assistant", "content": "Once upon a"}]
WORDS = "word " * 40


def chat(house: RouterHarness, **more: Any) -> httpx.Response:
    return httpx.post(house.url + CHAT, json={"model": "tiny", "messages": USER, "max_tokens": 6, **more})


def text(house: RouterHarness, **more: Any) -> httpx.Response:
    return httpx.post(house.url + TEXT, json={"model": "tiny", "prompt": WORDS, "max_tokens": 6, **more})


def generate(house: RouterHarness, **more: Any) -> list[i.GenerateResponse]:
    with grpc.insecure_channel(f"127.0.0.1:{house.ports['grpc']}") as channel:
        sampling = i.GenerateSampling(max_tokens=6)
        request = i.GenerateRequest(model="tiny", sampling=sampling, **more)
        return list(i_grpc.InferenceStub(channel).Generate(request, timeout=15))


def salt_of(house: RouterHarness) -> bytes:
    """Return the last salt of both workers, under which both computed the same hashes as the router."""
    prefill, decode = house.workers["prefill-0"], house.workers["decode-0"]
    assert not prefill.hash_mismatches
    assert not decode.hash_mismatches
    assert prefill.submitted[-1].salt == decode.submitted[-1].salt
    return prefill.submitted[-1].salt


def prompt_of(house: RouterHarness) -> str:
    return Tokenizer.load(MODEL).decode_all(house.workers["prefill-0"].submitted[-1].prompt)


def error_of(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


def test_cache_salt_is_in_the_root_of_the_hashes(shared: RouterHarness) -> None:
    salts: list[bytes] = []
    for more in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt": "x" * 1024}):
        for send in (text, chat):
            assert send(shared, **more).status_code == 200
            salts.append(salt_of(shared))
        assert salts[-1] == salts[-2]
    assert len(set(salts)) == 4
    generate(shared, text=WORDS, cache_salt="a")
    assert salt_of(shared) == salts[2]
    generate(shared, text=WORDS)
    assert salt_of(shared) == salts[0]


@pytest.mark.parametrize("length", [0, 1025])
def test_cache_salt_has_bounds(shared: RouterHarness, length: int) -> None:
    assert error_of(text(shared, cache_salt="x" * length))["param"] == "cache_salt"
    with pytest.raises(grpc.RpcError) as caught:
        generate(shared, text="a", cache_salt="x" * length)
    error: Any = caught.value
    assert dict(error.trailing_metadata())["tandem-param"] == "cache_salt"


def test_requests_of_one_cache_key_meet(build: Build) -> None:
    house = build(prefill=3, decode=3)
    house.wait_ready()

    def pairs(**more: Any) -> set[tuple[str, str]]:
        found = set()
        for _ in range(6):
            before = {name: len(worker.submitted) for name, worker in house.workers.items()}
            assert text(house, **more).status_code == 200
            prefill, decode = sorted(
                (name for name, worker in house.workers.items() if len(worker.submitted) > before[name]), reverse=True
            )
            found.add((prefill, decode))
        return found

    assert len(pairs()) > 1
    assert len(pairs(prompt_cache_key="a")) == 1
    assert len({next(iter(pairs(prompt_cache_key=str(key)))) for key in range(5)}) > 1
    assert error_of(text(house, prompt_cache_key=""))["param"] == "prompt_cache_key"


def test_an_answer_goes_on_with_the_last_message(shared: RouterHarness) -> None:
    assert chat(shared, messages=START, continue_final_message=True).status_code == 200
    continued = prompt_of(shared)
    assert continued.endswith("Once upon a")
    assert chat(shared, messages=START).status_code == 200
    asked = prompt_of(shared)
    assert asked.startswith(continued)
    assert asked != continued
    assert chat(shared, messages=START, add_generation_prompt=False).status_code == 200
    assert asked.startswith(prompt_of(shared))
    assert prompt_of(shared).startswith(continued)
    messages = [i.ChatMessage(**message) for message in START]
    generate(shared, chat=i.ChatMessages(messages=messages, continue_final_message=True))
    assert prompt_of(shared) == continued
    tokens = httpx.post(f"{shared.url}/tokenize", json={"messages": START, "continue_final_message": True}).json()
    assert Tokenizer.load(MODEL).decode_all(tokens["tokens"]) == continued


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"continue_final_message": True}, "continue_final_message"),
        ({"messages": START, "continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
        ({"continue_final_message": 1}, "continue_final_message"),
        ({"chat_template_kwargs": {"mood": "x"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": [[[[[[[[1]]]]]]]]}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": "x" * 20_000}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"metadata": {str(n): "x" for n in range(17)}}, "metadata"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a"),
        ({"safety_identifier": "x" * 65}, "safety_identifier"),
        ({"verbosity": "high"}, "verbosity"),
        ({"store": True}, "store"),
    ],
)
def test_refused_by_name(shared: RouterHarness, more: dict[str, Any], param: str) -> None:
    assert error_of(chat(shared, **more))["param"] == param


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url", "refusal"])
def test_parts_that_are_no_text_are_refused_by_name(shared: RouterHarness, kind: str) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": kind, kind: {}}]
    error = error_of(chat(shared, messages=[{"role": "user", "content": parts}]))
    assert (error["param"], error["code"]) == ("messages[0].content[1].type", "unsupported_parameter")
    assert kind in error["message"]


def test_text_parts_are_one_text(shared: RouterHarness) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert chat(shared, messages=[{"role": "user", "content": parts}]).status_code == 200
    whole = prompt_of(shared)
    assert chat(shared, messages=[{"role": "user", "content": "one\ntwo"}]).status_code == 200
    assert prompt_of(shared) == whole


def test_breakpoints_of_a_cache_do_not_change_the_prompt(shared: RouterHarness) -> None:
    """Clients of several APIs mark parts for Anthropic's cache."""
    part = {"type": "text", "text": "one"}
    for mark in ({"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}, None):
        marked = [{**part, "cache_control": mark}]
        assert chat(shared, messages=[{"role": "user", "content": marked}]).status_code == 200
        found = prompt_of(shared)
        assert chat(shared, messages=[{"role": "user", "content": [part]}]).status_code == 200
        assert prompt_of(shared) == found
    wrong = [{**part, "cache_control": "ephemeral"}]
    error = error_of(chat(shared, messages=[{"role": "user", "content": wrong}]))
    assert error["param"] == "messages[0].content[0].cache_control"


def test_the_operators_template_and_clients_variables(build: Build, tmp_path: Any) -> None:
    (tmp_path / "t.jinja").write_text("{{ mood | default('calm') }} {{ messages[0].content }}")
    house = build(models=(replace(TINY, chat_template=str(tmp_path / "t.jinja")),))
    house.wait_ready()
    for variables, words in (({}, "calm Hi"), ({"mood": "wild"}, "wild Hi")):
        assert chat(house, chat_template_kwargs=variables).status_code == 200
        assert prompt_of(house) == words
        given = i.ChatMessages(messages=[i.ChatMessage(**USER[0])], chat_template_kwargs=json.dumps(variables))
        generate(house, chat=given)
        assert prompt_of(house) == words
    for wrong in ("{", "[]", '{"m": 1}'):
        with pytest.raises(grpc.RpcError) as caught:
            generate(house, chat=i.ChatMessages(messages=[i.ChatMessage(**USER[0])], chat_template_kwargs=wrong))
        error: Any = caught.value
        assert dict(error.trailing_metadata())["tandem-param"] == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"content": "Ho", "reasoning_content": None, "reasoning": None, "refusal": None}, "Ho"),
        ({"content": "Ho", "reasoning_content": "Hm"}, "<Hm|Hm|Hm>Ho"),
        ({"content": "Ho", "reasoning": "Hm", "annotations": []}, "<Hm|Hm|Hm>Ho"),
        ({"content": "Ho", "tool_calls": [], "function_call": None, "audio": None}, "Ho"),
        ({"content": None, "reasoning": "Hm", "reasoning_content": "Hm"}, "<Hm|Hm|Hm>"),
        ({"content": None, "refusal": "No"}, "No"),
        ({"content": [{"type": "text", "text": "Ho"}, {"type": "refusal", "refusal": "No"}]}, "Ho\nNo"),
        ({"content": "Ho", "tool_call_id": None, "reasoning_details": [], "thinking_blocks": None}, "Ho"),
    ],
)
def test_earlier_answers_come_back_with_what_was_thought(
    build: Build, tmp_path: Any, answer: dict[str, Any], words: str
) -> None:
    thought = "<{{ one.reasoning_content }}|{{ one.reasoning }}|{{ one.thinking }}>"
    template = "{% for one in messages %}{% if one.thinking is defined %}" + thought + "{% endif %}{{ one.content }}"
    (tmp_path / "t.jinja").write_text(template + "{% endfor %}")
    house = build(models=(replace(TINY, chat_template=str(tmp_path / "t.jinja")),))
    house.wait_ready()
    messages = [*USER, {"role": "assistant", **answer}, *USER]
    sent = chat(house, messages=messages)
    assert sent.status_code == 200, sent.text
    assert prompt_of(house) == f"Hi{words}Hi"
    tokens = httpx.post(f"{house.url}/tokenize", json={"model": "tiny", "messages": messages}).json()["tokens"]
    assert Tokenizer.load(MODEL).decode_all(tokens) == f"Hi{words}Hi"


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_usage_with_every_chunk(shared: RouterHarness, path: str) -> None:
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 9, "n": 2, "stream": True}
    body |= {"messages": USER} if path == CHAT else {"prompt": "Hi"}
    options = {"include_usage": True, "continuous_usage_stats": True}
    raw = httpx.post(shared.url + path, json={**body, "stream_options": options}).text
    chunks = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: {")]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] < 18
    assert len(set(counts)) > 1
    assert chunks[-1]["choices"] == []
    assert counts[-1] == 18
    assert all(chunk["usage"]["total_tokens"] - n == chunks[0]["usage"]["prompt_tokens"]
               for chunk, n in zip(chunks, counts, strict=True))  # fmt: skip
    alone = httpx.post(shared.url + path, json={**body, "stream_options": {"continuous_usage_stats": True}}).text
    last = json.loads([line for line in alone.splitlines() if line.startswith("data: {")][-1][6:])
    assert last["choices"]
    assert last["usage"]["completion_tokens"] == 18


def test_who_names_a_tier_hears_which_it_was(shared: RouterHarness) -> None:
    assert chat(shared, service_tier="auto").json()["service_tier"] == "default"
    assert "service_tier" not in chat(shared).json()
    raw = chat(shared, service_tier="default", stream=True).text
    assert json.loads(raw.splitlines()[0][6:])["service_tier"] == "default"


def test_health_and_version(build: Build) -> None:
    house = build()
    house.wait_ready()
    assert httpx.get(f"{house.url}/health").status_code == 200
    assert httpx.get(f"{house.url}/version").json() == {"version": house.status()["version"]}
    house.kill_worker("decode-0")
    house.wait(lambda: bool(house.router.readiness.missing()))
    assert httpx.get(f"{house.url}/health").status_code == 503
    assert httpx.get(f"{house.url}/livez").status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "what"),
    [
        ("POST", "/v1/embeddings", "embeddings"),
        ("POST", "/v1/moderations", "moderation"),
        ("POST", "/v1/audio/transcriptions", "audio"),
        ("POST", "/v1/images/generations", "images"),
        ("GET", "/v1/fine_tuning/jobs", "fine-tuning"),
        ("DELETE", "/v1/assistants/a", "assistants"),
        ("POST", "/rerank", "reranking"),
    ],
)
def test_paths_that_others_serve_are_refused_by_name(shared: RouterHarness, method: str, path: str, what: str) -> None:
    error = error_of(httpx.request(method, shared.url + path), 404)
    assert (error["code"], error["type"]) == ("unsupported_endpoint", "invalid_request_error")
    assert path in error["message"]
    assert what in error["message"]
    assert error_of(httpx.request(method, f"{shared.url}{path}x/y"), 404)["code"] in (
        "invalid_request", "unsupported_endpoint",
    )  # fmt: skip
