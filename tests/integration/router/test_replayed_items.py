"""Items that servers sent come back as the `openai` client repeats them: what a model reads of them, what is kept, and
which are refused."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import (
    EasyInputMessage,
    ResponseItem,
    ResponseOutputMessage,
    ResponseOutputRefusal,
    ResponseOutputText,
    ResponseReasoningItem,
)
from openai.types.responses.response_output_text import AnnotationURLCitation, Logprob, LogprobTopLogprob
from openai.types.responses.response_reasoning_item import Content, Summary
from pydantic import BaseModel, TypeAdapter

from tandem.router.api.http.responses.response_models import InputItemList
from tandem.router.tokenization.tokenizer import Tokenizer
from tandem.statestore.embedded_redis import PrivateRedis
from tests.integration.router.house import MODEL, TINY, RouterHarness, builder

TEMPLATE = (
    "{% for one in messages %}[{{ one.role }}:"
    "{% if one.thinking is defined %}<{{ one.reasoning_content }}|{{ one.reasoning }}|{{ one.thinking }}>{% endif %}"
    "{{ one.content }}]{% endfor %}"
)
ITEM: TypeAdapter[ResponseItem] = TypeAdapter(ResponseItem)
THOUGHT = ResponseReasoningItem(
    id="rs_1",
    type="reasoning",
    summary=[Summary(type="summary_text", text="In short")],
    content=[Content(type="reasoning_text", text="Hm"), Content(type="reasoning_text", text="Oh")],
    encrypted_content="sealed",
    status="completed",
)
SEALED = ResponseReasoningItem(id="rs_2", type="reasoning", summary=[], encrypted_content="sealed")
CITED = ResponseOutputText(
    type="output_text",
    text="Ho",
    annotations=[AnnotationURLCitation(type="url_citation", url="http://a", title="A", start_index=0, end_index=2)],
    logprobs=[
        Logprob(
            token="Ho",
            bytes=[72, 111],
            logprob=-0.5,
            top_logprobs=[LogprobTopLogprob(token="Ha", bytes=[72, 97], logprob=-1.5)],
        )
    ],
)
PLAIN = ResponseOutputText(type="output_text", text="Ho", annotations=[], logprobs=[])
REFUSED = ResponseOutputRefusal(type="refusal", refusal="No")
SHAPES: dict[str, tuple[list[BaseModel], str]] = {
    "a thought": ([THOUGHT], "[assistant:<Hm\nOh|Hm\nOh|Hm\nOh>]"),
    "what no model reads": ([SEALED], ""),
    "citations and log-probabilities": (
        [ResponseOutputMessage(id="msg_1", type="message", role="assistant", status="completed", content=[CITED])],
        "[assistant:Ho]",
    ),
    "a refusal": (
        [ResponseOutputMessage(id="msg_1", type="message", role="assistant", status="completed", content=[REFUSED])],
        "[assistant:No]",
    ),
    "a thought and an answer": (
        [
            SEALED,
            THOUGHT,
            ResponseOutputMessage(
                id="msg_1", type="message", role="assistant", status="incomplete", content=[PLAIN, REFUSED]
            ),
        ],
        "[assistant:<Hm\nOh|Hm\nOh|Hm\nOh>Ho\nNo]",
    ),
}


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory, redis: PrivateRedis) -> Iterator[RouterHarness]:
    """A test router with a template that writes out roles, and thoughts under every name."""
    folder = tmp_path_factory.mktemp("router")
    (folder / "t.jinja").write_text(TEMPLATE)
    with builder(folder) as make:
        house = make(redis_url=redis.url, models=(replace(TINY, chat_template=str(folder / "t.jinja")),))
        house.wait_ready()
        yield house


@pytest.fixture
def client(house: RouterHarness) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{house.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, given: Any, **more: Any) -> Any:
    return client.responses.create(model="tiny", input=given, max_output_tokens=4, **more)


def prompt_of(house: RouterHarness) -> str:
    """The last prompt that a worker got."""
    return Tokenizer.load(MODEL).decode_all(list(house.workers["decode-0"].submitted[-1].prompt))


@pytest.mark.parametrize("dumped", [{}, {"exclude_none": True}, {"exclude_unset": True}], ids=str)
def test_an_answer_and_its_input_come_back(client: openai.OpenAI, house: RouterHarness, dumped: Any) -> None:
    first = ask(client, "Hi")
    listed = client.responses.input_items.list(first.id)
    given = [item.model_dump(**dumped) for item in (*listed, *first.output)]
    ask(client, [*given, EasyInputMessage(role="user", content="And?").model_dump(**dumped)])
    assert prompt_of(house) == f"[user:Hi][assistant:{first.output_text}][user:And?]"


@pytest.mark.parametrize("dumped", [{}, {"exclude_none": True}, {"exclude_unset": True}], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_what_servers_send_comes_back(client: openai.OpenAI, house: RouterHarness, shape: str, dumped: Any) -> None:
    items, words = SHAPES[shape]
    answer = ask(client, [*(item.model_dump(**dumped) for item in items), {"role": "user", "content": "And?"}])
    assert prompt_of(house) == f"{words}[user:And?]"

    listed = httpx.get(f"{house.url}/v1/responses/{answer.id}/input_items", params={"order": "asc"})
    assert len(InputItemList.model_validate_json(listed.text, strict=True).data) == len(items) + 1
    kept = [ITEM.validate_json(json.dumps(one), strict=True) for one in listed.json()["data"]]
    assert [one.model_dump() for one in kept[:-1]] == [one.model_dump() for one in items]

    ask(client, "Well?", previous_response_id=answer.id)
    assert prompt_of(house) == f"{words}[user:And?][assistant:{answer.output_text}][user:Well?]"


def test_reasoning_that_no_model_can_read_is_no_message(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="no message") as caught:
        ask(client, [SEALED.model_dump()])
    assert caught.value.param == "input"


MESSAGE = {"type": "message", "role": "assistant"}
REASONING: dict[str, Any] = {"type": "reasoning", "summary": []}


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"type": "reasoning"}, "summary"),
        ({**REASONING, "summary": "In short"}, "summary"),
        ({**REASONING, "summary": [{"type": "reasoning_text", "text": "Hm"}]}, "summary[0].type"),
        ({**REASONING, "content": "Hm"}, "content"),
        ({**REASONING, "content": [{"type": "output_text", "text": "Hm"}]}, "content[0].type"),
        ({**REASONING, "content": [{"type": "reasoning_text", "text": None}]}, "content[0].text"),
        ({**REASONING, "content": [{"type": "reasoning_text", "text": "a"}] * 1025}, "content"),
        ({**REASONING, "encrypted_content": {}}, "encrypted_content"),
        ({**REASONING, "encrypted_content": "a" * (1 << 20) + "a"}, "encrypted_content"),
        ({**REASONING, "status": "over"}, "status"),
        ({**REASONING, "id": "rs_" + "1" * 62}, "id"),
        ({**REASONING, "role": "assistant"}, "role"),
        ({**MESSAGE, "content": [{"type": "refusal"}]}, "content[0].refusal"),
        ({**MESSAGE, "content": [{"type": "refusal", "refusal": 1}]}, "content[0].refusal"),
        ({**MESSAGE, "content": [{"text": "a"}]}, "content[0].type"),
        ({**MESSAGE, "role": "user", "content": [{"type": "refusal", "refusal": "No"}]}, "content[0].type"),
        ({**MESSAGE, "content": [{**PLAIN.to_dict(), "annotations": "A"}]}, "content[0].annotations"),
        ({**MESSAGE, "content": [{**PLAIN.to_dict(), "annotations": ["A"]}]}, "content[0].annotations[0]"),
        ({**MESSAGE, "content": [{**PLAIN.to_dict(), "annotations": [{"a": []}]}]}, "content[0].annotations[0].a"),
        ({**MESSAGE, "content": [{**PLAIN.to_dict(), "logprobs": [{"logprob": -1}]}]}, "content[0].logprobs[0].token"),
        ({**MESSAGE, "content": "Ho", "phase": "final_answer"}, "phase"),
        ({**MESSAGE, "content": "Ho", "type": 7}, "type"),
        ({"type": "item_reference", "id": "msg_1"}, "type"),
        ({"type": None, "id": "msg_1"}, "id"),
        ({"type": "file_search_call", "id": "fs_1", "status": "completed", "queries": []}, "type"),
        ({"type": "function_call", "call_id": "c", "arguments": "{}"}, "name"),
        ({"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "namespace": "n"}, "namespace"),
        ({"type": "function_call_output", "output": "x"}, "call_id"),
        ({"type": "function_call_output", "call_id": "c", "output": 7}, "output"),
        ({"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}]}, "output[0].type"),
    ],
)
def test_what_is_wrong_is_named(client: openai.OpenAI, item: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, [{"role": "user", "content": "Hi"}, item])
    assert caught.value.param == f"input[1].{param}"
