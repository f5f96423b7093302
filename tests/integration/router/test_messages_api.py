"""The `anthropic` client uses the Messages API: whole, streamed, counted; and what goes wrong."""

import asyncio
import json
import socket
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import RawMessageStreamEvent
from pydantic import TypeAdapter

from tandem.core.config import Anonymous
from tandem.router.api.http.messages import handlers
from tandem.router.tokenization.tokenizer import Tokenizer
from tests.integration.router.house import ADMIN_KEY, MODEL, Build, RouterHarness
from tests.integration.router.messages import HELLO, assert_error
from tests.integration.router.scripted_worker import Script
from tools.made_up_worker import EOS
from tools.waiting import wait_for

BODY: dict[str, Any] = {"model": "tiny", "messages": [HELLO], "max_tokens": 12, "temperature": 0}
ASK: dict[str, Any] = {"model": "tiny", "messages": [HELLO], "max_tokens": 12, "extra_body": {"temperature": 0}}
"""The same for clients: newer releases have no parameter for the temperature."""
EVENT: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)


def client_of(house: RouterHarness, **more: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=house.url, max_retries=0, **{"api_key": "none", **more})


@pytest.fixture
def client(shared: RouterHarness) -> Iterator[anthropic.Anthropic]:
    with client_of(shared) as client:
        yield client


def post(house: RouterHarness, path: str = "/v1/messages", **more: Any) -> httpx.Response:
    return httpx.post(house.url + path, json={**BODY, **more})


def prompt_of(house: RouterHarness) -> list[int]:
    return list(house.workers["prefill-0"].submitted[-1].prompt)


def text_of(house: RouterHarness) -> str:
    worker = house.workers["decode-0"]
    return Tokenizer.load(MODEL).decode(worker.script.answer(worker.submitted[-1], 0))


def shown(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_whole(client: anthropic.Anthropic, shared: RouterHarness) -> None:
    raw = client.messages.with_raw_response.create(
        **{**ASK, "extra_body": {"temperature": 0, "top_p": 0.5, "top_k": 7}}, system="Be brief."
    )
    answer = raw.parse()
    assert shown(answer) == text_of(shared)
    assert answer.id.startswith("msg_")
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "tiny")
    assert (answer.stop_reason, answer.stop_sequence) == ("max_tokens", None)
    assert answer.usage.input_tokens == len(prompt_of(shared))
    assert answer.usage.output_tokens == 12
    assert (answer.usage.cache_read_input_tokens, answer.usage.cache_creation_input_tokens) == (0, 0)
    assert raw.headers["request-id"] == answer.id
    sampling = shared.workers["decode-0"].submitted[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0, 0.5, 7, 12)
    messages = [{"role": "system", "content": "Be brief."}, HELLO]
    assert prompt_of(shared) == asyncio.run(Tokenizer.load(MODEL).encode_chat(messages))


def test_the_stream_says_the_same(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**ASK)
    with client.messages.stream(**ASK) as stream:
        pieces = list(stream.text_stream)
        last = stream.get_final_message()
    assert len(pieces) > 1
    assert "".join(pieces) == shown(last) == shown(whole)
    assert (last.usage, last.stop_reason) == (whole.usage, whole.stop_reason)
    kinds = [event.type for event in client.messages.create(**ASK, stream=True)]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_each_event_is_of_the_clients_types(shared: RouterHarness) -> None:
    answer = post(shared, stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        event = EVENT.validate_json(data.removeprefix("data: "), strict=True)
        assert name == f"event: {event.type}"


def test_tokens_are_counted(client: anthropic.Anthropic, shared: RouterHarness) -> None:
    for more in ({}, {"system": "Be brief."}, {"messages": [HELLO, {"role": "assistant", "content": "Once"}]}):
        asked: Any = {"model": "tiny", "messages": [HELLO], **more}
        count = client.messages.count_tokens(**asked).input_tokens
        usage = client.messages.create(**asked, max_tokens=1).usage
        assert count == usage.input_tokens == len(prompt_of(shared))


def test_an_answer_goes_on_with_the_last_message(client: anthropic.Anthropic, shared: RouterHarness) -> None:
    client.messages.create(**{**ASK, "messages": [HELLO, {"role": "assistant", "content": "Once upon a"}]})
    assert Tokenizer.load(MODEL).decode_all(prompt_of(shared)).endswith("Once upon a")


def test_what_changes_from_turn_to_turn_is_not_in_the_prompt(shared: RouterHarness) -> None:
    prompts = []
    for turn, breakpoint_ in (("a1", {"type": "ephemeral"}), ("b2", {"type": "ephemeral", "ttl": "1h"}), ("c3", None)):
        header = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={turn};"}
        said = {"type": "text", "text": "Be brief.", "cache_control": breakpoint_}
        user = {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": breakpoint_}]}
        answer = post(shared, system=[header, said], messages=[user], cache_control=breakpoint_)
        assert answer.status_code == 200, answer.text
        prompts.append(prompt_of(shared))
    assert prompts[0] == prompts[1] == prompts[2]
    assert "billing" not in Tokenizer.load(MODEL).decode_all(prompts[0])


def test_cached_tokens_are_counted_apart(build: Build) -> None:
    house = build(script=Script(cached_tokens=16))
    house.wait_ready()
    with client_of(house) as client:
        messages: Any = [{"role": "user", "content": "word " * 40}]
        answer = client.messages.create(**{**ASK, "messages": messages})
        with client.messages.stream(**{**ASK, "messages": messages}) as stream:
            begun = next(event for event in stream if event.type == "message_start").message.usage
            streamed = stream.get_final_message()
        count = client.messages.count_tokens(model="tiny", messages=messages).input_tokens
    assert answer.usage.cache_read_input_tokens == 16
    assert answer.usage.input_tokens == count - 16
    assert streamed.usage == answer.usage
    assert (begun.input_tokens, begun.cache_read_input_tokens) == (count - 16, 16)


def test_why_it_stops(build: Build) -> None:
    house = build(script=Script(answer=lambda submit, choice: [400, 500, 600, EOS]))
    house.wait_ready()
    text = Tokenizer.load(MODEL).decode([400, 500, 600])
    ends = text[-2:]
    with client_of(house) as client:
        whole = client.messages.create(**ASK)
        assert (shown(whole), whole.stop_reason, whole.stop_sequence) == (text, "end_turn", None)
        cut = client.messages.create(**ASK, stop_sequences=["never", ends])
        assert (shown(cut), cut.stop_reason, cut.stop_sequence) == (text[: text.find(ends)], "stop_sequence", ends)
        with client.messages.stream(**ASK, stop_sequences=["never", ends]) as stream:
            last = stream.get_final_message()
        assert (last.stop_reason, last.stop_sequence, shown(last)) == ("stop_sequence", ends, shown(cut))


def test_an_answer_ends_with_the_context(client: anthropic.Anthropic, shared: RouterHarness) -> None:
    messages: Any = [{"role": "user", "content": "word " * 4000}]
    count = client.messages.count_tokens(model="tiny", messages=messages).input_tokens
    with client.messages.stream(model="tiny", messages=messages, max_tokens=32_000) as stream:
        last = stream.get_final_message()
    assert (last.stop_reason, last.usage.output_tokens) == ("model_context_window_exceeded", 4096 - count)
    with pytest.raises(anthropic.BadRequestError, match="Shorten the prompt"):
        client.messages.create(model="tiny", messages=[{"role": "user", "content": "word " * 5000}], max_tokens=1)


def new_key(house: RouterHarness, **wish: Any) -> str:
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    made = httpx.post(f"{house.admin_url}/admin/v1/keys", json={"tenant": "acme", **wish}, headers=headers)
    assert made.status_code == 201, made.text
    return str(made.json()["key"])


def test_keys_come_in_either_header(build: Build) -> None:
    house = build(anonymous=Anonymous.NEVER)
    house.wait_ready()
    key = new_key(house)
    for headers in ({"x-api-key": key}, {"authorization": f"Bearer {key}"}):
        assert httpx.post(f"{house.url}/v1/messages", json=BODY, headers=headers).status_code == 200
        assert httpx.get(f"{house.url}/v1/models", headers=headers).status_code == 200
    for more in ({"api_key": key}, {"api_key": None, "auth_token": key}):
        with client_of(house, **more) as client:
            assert client.messages.create(**ASK).stop_reason == "max_tokens"
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        for headers in ({}, {"x-api-key": "wrong"}, {"authorization": "Bearer wrong"}):
            refused = httpx.post(house.url + path, json=BODY, headers=headers)
            assert_error(refused, 401, "authentication_error")
            assert refused.headers["www-authenticate"] == "Bearer"
    other = new_key(house, scopes=["metrics"])
    denied = httpx.post(f"{house.url}/v1/messages", json=BODY, headers={"x-api-key": other})
    assert_error(denied, 403, "permission_error")
    assert "error" in httpx.get(f"{house.url}/v1/models", headers={"x-api-key": "wrong"}).json()


def test_errors_raise_what_the_client_knows(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="gpt-9"):
        client.messages.create(**{**ASK, "model": "gpt-9"})
    with pytest.raises(anthropic.BadRequestError, match="temperature") as caught:
        client.messages.create(**{**ASK, "extra_body": {"temperature": 3}})
    assert caught.value.request_id
    with pytest.raises(anthropic.NotFoundError, match="batches of messages"):
        client.messages.batches.list()
    image: Any = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content\[0\].type is 'image'"):
        client.messages.create(**{**ASK, "messages": [{"role": "user", "content": [image]}]})


def test_a_schema_is_a_grammar_of_the_answer(build: Build) -> None:
    house = build()
    house.wait_ready()
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    assert post(house, output_config={"format": {"type": "json_schema", "schema": schema}}).status_code == 200
    submit = house.workers["prefill-0"].submitted[-1]
    assert '"city"' in submit.sampling.grammar
    wrong = {"type": "object", "properties": {"city": {"type": "town"}}}
    refused = post(house, output_config={"format": {"type": "json_schema", "schema": wrong}})
    assert_error(refused, 400, "invalid_request_error")
    assert "output_config.format.schema.properties.city.type" in refused.json()["error"]["message"]


def test_a_stream_that_breaks_off_ends_with_an_error(build: Build) -> None:
    house = build(script=Script(stall_at=4))
    house.wait_ready()
    answer = httpx.post(
        f"{house.url}/v1/messages", json={**BODY, "stream": True}, headers={"X-Request-Timeout": "1"}, timeout=30
    )
    assert answer.status_code == 200
    name, data = answer.text.strip().split("\n\n")[-1].split("\n")
    assert name == "event: error"
    error = json.loads(data.removeprefix("data: "))
    assert (error["type"], error["error"]["type"]) == ("error", "timeout_error")
    assert error["request_id"] == answer.headers["request-id"]
    with client_of(house, default_headers={"X-Request-Timeout": "1"}) as client:
        with client.messages.stream(**ASK) as stream, pytest.raises(anthropic.APIStatusError):
            stream.get_final_message()
        with pytest.raises(anthropic.APIStatusError) as caught:
            client.messages.create(**ASK)
    assert caught.value.status_code == 504


def test_long_silence_is_broken_by_pings(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "PING_S", 0.02)
    house = build(script=Script(step_s=0.2, prefill_s=0.3))
    house.wait_ready()
    answer = post(house, stream=True, max_tokens=3)
    names = [line.removeprefix("event: ") for line in answer.text.splitlines() if line.startswith("event: ")]
    assert names[0] == "ping"
    begun = names.index("message_start")
    assert "ping" in names[begun:]
    assert names[-1] == "message_stop"
    with client_of(house) as client, client.messages.stream(**{**ASK, "max_tokens": 3}) as stream:
        assert shown(stream.get_final_message()) == text_of(house)


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_leaves_ends_its_request(build: Build, is_stream: bool) -> None:
    house = build(script=Script(step_s=0.05))
    house.wait_ready()
    body = json.dumps({**BODY, "max_tokens": 500, "stream": is_stream}).encode()
    head = f"POST /v1/messages HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    worker = house.workers["decode-0"]
    with socket.create_connection(("127.0.0.1", house.ports["http"])) as connection:
        connection.sendall(head.encode() + body)
        wait_for(lambda: worker.said and worker.said.most_common(1)[0][1] > 2)
    wait_for(lambda: len(worker.cancelled) == 1)
    wait_for(lambda: house.metric('tandem_requests_total{api="messages",outcome="cancelled"}') == 1)


def test_requests_are_counted_and_timed(shared: RouterHarness) -> None:
    for api, path in (("messages", "/v1/messages"), ("count_tokens", "/v1/messages/count_tokens")):
        wrong = f'tandem_requests_total{{api="{api}",outcome="model_not_found"}}'
        before = shared.metric(wrong)
        body = {"model": "no", "messages": [HELLO], **({"max_tokens": 1} if api == "messages" else {})}
        assert_error(httpx.post(shared.url + path, json=body), 404, "not_found_error")
        assert shared.metric(wrong) == before + 1
    done = 'tandem_requests_total{api="messages",outcome="ok"}'
    before = shared.metric(done)
    timed = httpx.post(f"{shared.url}/v1/messages", json=BODY, headers={"x-tandem-timing": "1"})
    assert shared.metric(done) == before + 1
    assert json.loads(timed.headers["x-tandem-timing"])["decode"] == "decode-0"
