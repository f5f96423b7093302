"""The `openai` client uses the Responses API: whole, streamed, continued, kept, deleted; and what goes wrong."""

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response

from tandem.router.tokenization.tokenizer import Tokenizer
from tandem.statestore.connection import connect
from tandem.statestore.embedded_redis import PrivateRedis
from tandem.statestore.keys import Keys
from tests.integration.router.house import MODEL, Build, RouterHarness
from tests.integration.router.scripted_worker import Script
from tools.made_up_worker import EOS

ASK: dict[str, Any] = {"model": "tiny", "input": "Say something.", "max_output_tokens": 12, "temperature": 0}


@pytest.fixture
def client(keeping: RouterHarness) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{keeping.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def prompt_of(house: RouterHarness) -> str:
    """The last prompt that a worker got, as text with its special tokens."""
    return Tokenizer.load(MODEL).decode_all(list(house.workers["decode-0"].submitted[-1].prompt))


def text_of(house: RouterHarness) -> str:
    worker = house.workers["decode-0"]
    return Tokenizer.load(MODEL).decode(worker.script.answer(worker.submitted[-1], 0))


def test_whole(client: openai.OpenAI, keeping: RouterHarness) -> None:
    answer = client.responses.create(**ASK, instructions="Be brief.", metadata={"a": "b"}, top_p=0.5)
    assert answer.output_text == text_of(keeping)
    assert (answer.status, answer.object, answer.model) == ("incomplete", "response", "tiny")
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert (answer.instructions, answer.metadata, answer.top_p) == ("Be brief.", {"a": "b"}, 0.5)
    assert answer.usage is not None
    worker = keeping.workers["decode-0"]
    assert answer.usage.input_tokens == len(worker.submitted[-1].prompt)
    assert (answer.usage.output_tokens, answer.usage.total_tokens) == (12, 12 + answer.usage.input_tokens)
    assert answer.usage.input_tokens_details.cached_tokens == 0
    assert answer.usage.output_tokens_details.reasoning_tokens == 0
    assert worker.submitted[-1].sampling.top_p == 0.5
    prompt = prompt_of(keeping)
    assert prompt.index("Be brief.") < prompt.index("Say something.")
    assert client.responses.retrieve(answer.id).model_dump() == answer.model_dump()


def test_an_answer_that_ends_by_itself_is_completed(client: openai.OpenAI, keeping: RouterHarness) -> None:
    script = keeping.workers["decode-0"].script
    before = script.answer
    for worker in keeping.workers.values():
        worker.script.answer = lambda submit, choice: [400, 500, EOS]
    try:
        answer = client.responses.create(model="tiny", input="Hi")
        assert (answer.status, answer.incomplete_details) == ("completed", None)
        assert answer.completed_at is not None
        assert answer.output_text == Tokenizer.load(MODEL).decode([400, 500])
    finally:
        for worker in keeping.workers.values():
            worker.script.answer = before


def test_the_stream_says_the_same(client: openai.OpenAI, keeping: RouterHarness) -> None:
    whole = client.responses.create(**ASK)
    with client.responses.stream(**ASK) as stream:
        events = list(stream)
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    last = events[-1]
    assert last.type == "response.incomplete"
    assert deltas == last.response.output_text == whole.output_text
    assert last.response.usage == whole.usage
    assert client.responses.retrieve(last.response.id).output_text == whole.output_text


def test_a_conversation_goes_on(client: openai.OpenAI, keeping: RouterHarness) -> None:
    first = client.responses.create(model="tiny", input="My name is Ada.", instructions="A", max_output_tokens=5)
    second = client.responses.create(
        model="tiny", input="Who am I?", previous_response_id=first.id, instructions="B", max_output_tokens=5
    )
    assert second.previous_response_id == first.id
    messages = [
        {"role": "system", "content": "B"},  # instructions of earlier turns are not carried over
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "Who am I?"},
    ]
    wanted = asyncio.run(Tokenizer.load(MODEL).encode_chat(messages))
    assert list(keeping.workers["decode-0"].submitted[-1].prompt) == wanted
    third = client.responses.create(model="tiny", input="Again?", previous_response_id=second.id, max_output_tokens=5)
    wanted_third = [*messages[1:], {"role": "assistant", "content": second.output_text}]
    wanted_third.append({"role": "user", "content": "Again?"})
    wanted = asyncio.run(Tokenizer.load(MODEL).encode_chat(wanted_third))
    assert list(keeping.workers["decode-0"].submitted[-1].prompt) == wanted
    by_hand: Any = [*first.output, {"role": "user", "content": "And now?"}]
    assert client.responses.create(model="tiny", input=by_hand, max_output_tokens=2).status == "incomplete"
    items = client.responses.input_items.list(third.id)
    assert [item.to_dict()["content"] for item in items] == [[{"type": "input_text", "text": "Again?"}]]


def test_input_items_page_by_page(client: openai.OpenAI) -> None:
    given: Any = [{"role": "user", "content": str(n)} for n in range(5)]
    answer = client.responses.create(model="tiny", input=given, max_output_tokens=2)
    shown = [item.to_dict()["content"][0]["text"] for item in client.responses.input_items.list(answer.id, limit=2)]  # type: ignore[index]
    assert shown == ["4", "3", "2", "1", "0"]
    first = client.responses.input_items.list(answer.id, limit=2, order="asc")
    assert [item.to_dict()["content"][0]["text"] for item in first.data] == ["0", "1"]  # type: ignore[index]
    assert first.has_more


def test_what_is_not_to_be_stored_is_not(client: openai.OpenAI) -> None:
    answer = client.responses.create(**ASK, store=False)
    with pytest.raises(openai.NotFoundError, match="never stored"):
        client.responses.retrieve(answer.id)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**ASK, previous_response_id=answer.id)
    assert caught.value.param == "previous_response_id"


def test_deleted_is_gone_and_so_is_what_it_began(client: openai.OpenAI) -> None:
    first = client.responses.create(**ASK)
    second = client.responses.create(**ASK, previous_response_id=first.id)
    client.responses.delete(first.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            call(first.id)
    with pytest.raises(openai.BadRequestError, match="not stored any more"):
        client.responses.create(**ASK, previous_response_id=second.id)
    assert client.responses.retrieve(second.id).id == second.id
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(second.id)


@pytest.mark.parametrize("name", ["resp_none", "resp_" + "x" * 200, "chatcmpl-1", "resp_a:b", "é"])
def test_ids_that_are_none(client: openai.OpenAI, name: str) -> None:
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(name)
    with pytest.raises(openai.BadRequestError):
        client.responses.create(**ASK, previous_response_id=name)


@pytest.mark.parametrize(
    ("changes", "param", "status"),
    [
        ({"model": "none"}, "model", 404),
        ({"input": ""}, "input", 200),
        ({"max_output_tokens": 0}, "max_output_tokens", 400),
        ({"max_output_tokens": 10**6}, "max_output_tokens", 400),
        ({"temperature": 3}, "temperature", 400),
        ({"input": "word " * 9000}, "input", 400),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", 400),
        ({"stream_options": {}}, "stream_options", 400),
        ({"stream": True, "stream_options": {"include_usage": True}}, "stream_options.include_usage", 400),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
            400,
        ),
        ({"input": [{"role": "assistant", "phase": "commentary", "content": "a"}]}, "input[0].phase", 400),
        ({"bogus": 1}, "bogus", 400),
    ],
)
def test_wrong_requests(keeping: RouterHarness, changes: dict[str, Any], param: str, status: int) -> None:
    answer = httpx.post(f"{keeping.url}/v1/responses", json={**ASK, **changes})
    assert answer.status_code == status, answer.text
    if status != 200:
        assert answer.json()["error"]["param"] == param


def test_queries_that_are_not_there(client: openai.OpenAI, keeping: RouterHarness) -> None:
    answer = client.responses.create(**ASK)
    for query in ("stream=true", "include[]=message.output_text.logprobs"):
        refused = httpx.get(f"{keeping.url}/v1/responses/{answer.id}?{query}")
        assert refused.status_code == 400
    for query in ("limit=0", "limit=101", "limit=x", "order=up"):
        assert httpx.get(f"{keeping.url}/v1/responses/{answer.id}/input_items?{query}").status_code == 400


def test_it_expires_but_not_while_it_is_continued(client: openai.OpenAI, redis: PrivateRedis) -> None:
    first = client.responses.create(**ASK)

    async def left_ms(response: str, then_ms: int | None = None) -> int:
        client = await connect(redis.url)
        key = Keys("test").response(response)
        left: int = await client.pttl(key)
        if then_ms is not None:
            await client.pexpire(key, then_ms)
        await client.aclose()
        return left

    week_ms = 7 * 86_400_000
    assert week_ms - 60_000 < asyncio.run(left_ms(first.id, then_ms=50_000)) <= week_ms
    client.responses.create(**ASK, previous_response_id=first.id)
    assert asyncio.run(left_ms(first.id)) > week_ms - 60_000


def test_a_stream_that_breaks_ends_with_a_failed_response(build: Build, redis: PrivateRedis) -> None:
    house = build(redis_url=redis.url, script=Script(stall_at=3), request_timeout_s=1.0)
    house.wait_ready()
    with openai.OpenAI(base_url=f"{house.url}/v1", api_key="none", max_retries=0) as client:
        events = list(client.responses.create(**ASK, stream=True))
        last = events[-1]
        assert last.type == "response.failed"
        assert Response.model_validate(last.response.model_dump(), strict=True).error is not None
        assert last.response.error is not None
        assert last.response.error.code == "server_error"
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(last.response.id)


def test_without_redis_answers_go_on_and_say_that_they_are_not_kept(build: Build, tmp_path: Any) -> None:
    with PrivateRedis.start(tmp_path / "redis", "a secret") as server:
        house = build(redis_url=server.url)
        house.wait_ready()
        with openai.OpenAI(base_url=f"{house.url}/v1", api_key="none", max_retries=0) as client:
            kept = client.responses.create(**ASK)
            assert kept.to_dict()["store"] is True
            server.stop()
            lost = client.responses.create(**ASK)
            assert lost.to_dict()["store"] is False
            assert lost.output_text == kept.output_text
            with pytest.raises(openai.InternalServerError):
                client.responses.retrieve(kept.id)
            with pytest.raises(openai.InternalServerError):
                client.responses.create(**ASK, previous_response_id=kept.id)


def test_requests_of_one_cache_key_meet(build: Build, redis: PrivateRedis) -> None:
    house = build(prefill=3, decode=3, redis_url=redis.url)
    house.wait_ready()

    def used(**more: Any) -> set[str]:
        before = {name: len(worker.submitted) for name, worker in house.workers.items()}
        for _ in range(6):
            assert httpx.post(f"{house.url}/v1/responses", json={**ASK, **more}).status_code == 200
        return {name for name, worker in house.workers.items() if len(worker.submitted) > before[name]}

    assert len(used()) > 2
    assert len(used(prompt_cache_key="a")) == 2
