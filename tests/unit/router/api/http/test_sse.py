"""Large answers that are not streamed are written a little at a time."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest

from tandem.core.handoff import TokenLogprob
from tandem.core.lifecycle import FinishReason
from tandem.router.api.grpc_service import _Shown
from tandem.router.api.http.response_bodies import ResponseFrame
from tandem.router.api.http.sse import AnswerReply
from tandem.router.serving.choices import AnswerSettings, ChoiceUpdate
from tandem.router.serving.request_parser import MAX_ANSWER_SCORES
from tandem.router.serving.response_stream import TokenUsage
from tandem.router.tokenization.tokenizer import Tokenizer
from tandem.rpc.v1 import inference_pb2 as i
from tests.plugins.costs import measured

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
    nobody: Any = None
    frame = ResponseFrame(id="a", created=1, model="m", is_chat=is_chat, prompts=((1,),), logprobs=ALTERNATIVES)
    settings = AnswerSettings(
        api="chat", model="m", tokenizer=TOKENIZER, stop=(), received_s=0.0, backlog_bytes=1 << 20
    )
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    async def run() -> None:
        reply = AnswerReply(nobody, (), frame, settings, is_stream=False, wants_timing=False)
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
