"""Test entries of bodies, headers and large answers."""

import asyncio
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError
from starlette.requests import Request

from tandem.core.errors import InvalidRequestError
from tandem.core.handoff import TokenLogprob
from tandem.core.state_enums import FinishReason
from tandem.router.api.grpc_service import _Shown
from tandem.router.api.http.body_parser import (
    FREE,
    MAX_CONTAINERS,
    MAX_FIELDS,
    MAX_STRINGS,
    check,
    check_raw,
    unbounded,
)
from tandem.router.api.http.middleware import header
from tandem.router.api.http.response_bodies import AnswerReply, ResponseFrame
from tandem.router.api.http.responses.schemas import ResponseRequest
from tandem.router.api.http.schemas import MAX_PARTS, ChatRequest, CompletionRequest
from tandem.router.api.http.strict_models import Strict
from tandem.router.serving.choices import ChoiceUpdate
from tandem.router.serving.request_parser import MAX_ANSWER_SCORES, MAX_MESSAGES
from tandem.router.serving.response_stream import TokenUsage
from tandem.router.tokenization.tokenizer import Tokenizer
from tandem.rpc.v1 import inference_pb2 as i
from tests.plugins.costs import measured

LIMIT = 4 << 20
USER = {"role": "user", "content": "a"}
PART = {"type": "text", "text": "a"}


def wide(element: bytes, count: int) -> bytes:
    return b"[" + b",".join([element] * count) + b"]"


@pytest.mark.parametrize(
    ("element", "most", "what"),
    [
        (b"{}" + b" " * 20, MAX_CONTAINERS - 1, "lists and objects"),
        (b"[]" + b" " * 20, MAX_CONTAINERS - 1, "lists and objects"),
        (b"[]", round(FREE / (1 - 3 / 18)) - 1, "lists and objects"),
        (b'"abcd"', MAX_STRINGS, "texts"),
        (b'""', 2 * FREE, "texts"),
        (b"1", LIMIT * 3 // 16 + 1, "values"),
    ],
)
def test_more_than_a_body_may_have_is_refused_before_it_is_parsed(element: bytes, most: int, what: str) -> None:
    check_raw(wide(element, most), LIMIT)
    with pytest.raises(InvalidRequestError, match=f"too many {what}: at most"):
        check_raw(wide(element, most + 1), LIMIT)


@pytest.mark.parametrize("text", ["[", "{", ",", '"', '\\"', "\\", '\\\\"[', "\n[", "é[", '"[', "]},"])
def test_what_stands_in_texts_is_no_structure(text: str) -> None:
    """However texts are cut into the parts that are looked at."""
    for shift in range(4):
        body = {"a" * shift: text * (1_200_000 // len(text)), "b": [[], {}, 1, "x"]}
        check_raw(json.dumps(body, ensure_ascii=False).encode(), LIMIT)
        full = json.dumps({**body, "c": [[]] * MAX_CONTAINERS}, ensure_ascii=False).encode()
        with pytest.raises(InvalidRequestError, match="too many lists and objects"):
            check_raw(full, LIMIT)


CHAT: dict[str, Any] = {"model": "m", "messages": [USER]}


@pytest.mark.parametrize(
    ("model", "body", "message", "param"),
    [
        (ChatRequest, {**CHAT, "messages": [USER] * (MAX_MESSAGES + 1)}, "messages has 8193 entries", "messages"),
        (ChatRequest, {**CHAT, "messages": [USER, {"content": [PART] * (MAX_PARTS + 1)}]},
         "messages[1].content has 1025 entries", "messages[1].content"),
        (ChatRequest, {**CHAT, "messages": [{str(n): 1 for n in range(MAX_FIELDS + 1)}]},
         "messages[0] has 129 fields", "messages[0]"),
        (ChatRequest, {str(n): 1 for n in range(MAX_FIELDS + 1)}, "the request body has 129 fields", None),
        (ChatRequest, {**CHAT, "logit_bias": {str(n): 1 for n in range(1025)}}, "logit_bias has 1025", "logit_bias"),
        (ChatRequest, {**CHAT, "stream_options": {str(n): 1 for n in range(200)}}, "stream_options has 200 fields",
         "stream_options"),
        (CompletionRequest, {"prompt": ["a"] * 33}, "prompt has 33 entries", "prompt"),
        (CompletionRequest, {"prompt": [[1]] * 33}, "prompt has 33 entries", "prompt"),
        (CompletionRequest, {"prompt": [{}] * 33}, "prompt has 33 entries", "prompt"),
        (ResponseRequest, {"input": [USER] * (MAX_MESSAGES + 1)}, "input has 8193 entries", "input"),
        (ResponseRequest, {"input": [USER, {"content": [PART] * (MAX_PARTS + 1)}]},
         "input[1].content has 1025 entries", "input[1].content"),
        (ResponseRequest, {"input": [USER, {"type": "reasoning", "summary": [PART] * (MAX_PARTS + 1)}]},
         "input[1].summary has 1025 entries", "input[1].summary"),
        (ResponseRequest, {"input": [{"content": [{"type": "output_text", "annotations": [PART] * (MAX_PARTS + 1)}]}]},
         "input[0].content[0].annotations has 1025 entries", "input[0].content[0].annotations"),
        (ResponseRequest, {"input": [{"type": {}, **{str(n): 1 for n in range(MAX_FIELDS)}}]},
         "input[0] has 129 fields", "input[0]"),
    ],
)  # fmt: skip
def test_the_list_that_is_too_long_is_named(model: type[Strict], body: Any, message: str, param: str | None) -> None:
    with pytest.raises(InvalidRequestError) as found:
        check(body, model)
    assert found.value.what.startswith(message)
    assert "at most" in found.value.message
    assert found.value.param == param


def test_as_many_answers_as_messages_come_back_with_all_that_servers_put_into_them() -> None:
    empty = ("reasoning_content", "reasoning", "refusal", "tool_calls", "function_call", "audio", "annotations")
    answer = {"role": "assistant", "content": "a", **dict.fromkeys(empty)}
    body = {**CHAT, "messages": [answer] * MAX_MESSAGES}
    check_raw(json.dumps(body).encode(), LIMIT)
    check(body, ChatRequest)
    assert len(ChatRequest.model_validate(body).messages) == MAX_MESSAGES


def test_what_fits_is_left_alone() -> None:
    check({**CHAT, "messages": [USER] * MAX_MESSAGES, "stop": ["a"] * 16, "nonsense": [{}] * 5000}, ChatRequest)
    check({"prompt": [1] * 100_000}, CompletionRequest)
    check({"prompt": []}, CompletionRequest)
    check({"input": [{"type": {}, "content": [{}] * 5000}]}, ResponseRequest)
    check({"prompt": [[1] * 100_000] * 32}, CompletionRequest)


@pytest.mark.parametrize("field", ["prompt", "stop", "bad_words", "stop_token_ids", "allowed_token_ids"])
@pytest.mark.parametrize("element", [{}, [{}], 1.5, None, True])
def test_one_wrong_element_is_as_many_errors_as_a_thousand(field: str, element: Any) -> None:
    def errors(count: int) -> int:
        with pytest.raises(ValidationError) as found:
            CompletionRequest.model_validate({"model": "m", "prompt": "a", field: [element] * count})
        return found.value.error_count()

    assert errors(1000) <= errors(1) + 4  # a list that is too long is one more


def test_a_list_without_a_bound_is_found() -> None:
    class Inner(Strict):
        deep: list[list[int]]

    class Outer(Strict):
        inner: list[Inner] | None
        fine: bool

    assert unbounded(Outer) == ["Outer.inner", "Inner.deep", "Inner.deep"]


PAIRS = [(b"host", b"a"), (b"x-slo-class", b"first"), (b"x-slo-class", b"second"), (b"origin", b""), (b"who", b"\xe9")]


@pytest.mark.parametrize("name", ["host", "x-slo-class", "origin", "who", "absent"])
def test_one_is_found_as_among_all_of_them(name: str) -> None:
    request = Request({"type": "http", "headers": PAIRS})
    assert [header(request, name), header(request, name)] == [request.headers.get(name)] * 2


TOKENIZER = Tokenizer.load(Path(__file__).parents[5] / "models" / "tandem-tiny")
CHOICES, ALTERNATIVES = 16, 20
TOKENS = MAX_ANSWER_SCORES // CHOICES // (1 + ALTERNATIVES)


class Given:
    """An answer that has arrived, in one update a choice."""

    id = "a"
    choice_count = CHOICES
    usage = TokenUsage(prompt_tokens=1, completion_tokens=CHOICES * TOKENS, cached_tokens=0)

    def __init__(self) -> None:
        draw = random.Random(7)
        self.updates = [self._update(index, draw) for index in range(CHOICES)]
        self._left = [self.updates]

    def _update(self, index: int, draw: random.Random) -> ChoiceUpdate:
        tokens = draw.choices(range(500), k=TOKENS)
        logprobs = [
            TokenLogprob(
                token=token,
                logprob=-1.5,
                top=tuple((draw.randrange(500), -float(place)) for place in range(ALTERNATIVES)),
            )
            for token in tokens
        ]
        return ChoiceUpdate(index, "text", tokens, TOKENS, logprobs, list(range(TOKENS)), FinishReason.LENGTH)

    async def next(self) -> list[ChoiceUpdate] | None:
        return self._left.pop() if self._left else None


@pytest.mark.parametrize("is_chat", [True, False])
def test_the_largest_answer_with_log_probabilities_does_not_have_the_loop_stand(is_chat: bool) -> None:
    """33,000 tokens took 3 seconds in one turn."""
    given: Any = Given()
    frame = ResponseFrame(id="a", created=1, model="m", is_chat=is_chat, prompts=((1,),), logprobs=ALTERNATIVES)
    frontend: Any = SimpleNamespace(models=SimpleNamespace(find=lambda name: SimpleNamespace(tokenizer=TOKENIZER)))
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    async def run() -> None:
        reply = AnswerReply(frontend, (), frame, None, is_stream=False, wants_timing=False)
        with measured(asyncio.get_running_loop()) as cost:
            await reply._whole(given, {"type": "http"}, send)
        cost.check_turn()

    asyncio.run(run())
    body = json.loads(b"".join(sent))
    assert len(body["choices"]) == CHOICES
    assert body["usage"]["completion_tokens"] == CHOICES * TOKENS
    for choice, update in zip(body["choices"], given.updates, strict=True):
        found = choice["logprobs"]
        if is_chat:
            assert len(found["content"]) == TOKENS
            assert {len(one["top_logprobs"]) for one in found["content"]} == {ALTERNATIVES}
            assert [bytes(one["bytes"]) for one in found["content"]] == [*map(TOKENIZER.token_bytes, update.tokens)]
        else:
            assert {name: len(values) for name, values in found.items()} == dict.fromkeys(
                ("tokens", "token_logprobs", "top_logprobs", "text_offset"), TOKENS
            )
            assert found["text_offset"] == update.offsets


def test_nor_does_the_largest_one_of_the_best_over_grpc() -> None:
    given: Any = Given()

    async def run() -> i.GenerateResponse:
        shown = object.__new__(_Shown)
        shown.kept, shown._has_logprobs, shown._prompt = CHOICES, True, ()
        with measured(asyncio.get_running_loop()) as cost:
            response = await shown.response(given, given.updates, is_first=True)
        cost.check_turn()
        return response

    response = asyncio.run(run())
    assert [len(choice.logprobs) for choice in response.choices] == [TOKENS] * CHOICES
    assert [choice.text for choice in response.choices] == ["text"] * CHOICES
