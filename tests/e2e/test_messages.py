"""The `anthropic` client on a whole cluster with a real model: the same answers as the chat's, and cached prefixes."""

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tools.running_cluster import Cluster
from tools.waiting import wait_for

SYSTEM = "The list of all the words of a language is long. " * 6
HELLO: Any = {"role": "user", "content": "What does os.path.join do?"}
ASK: dict[str, Any] = {"model": "tandem-tiny", "max_tokens": 24, "extra_body": {"temperature": 0}}


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=cluster.api, api_key="unused", max_retries=0) as client:
        yield client


def shown(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_a_message_is_the_answer_of_the_same_chat(cluster: Cluster, client: anthropic.Anthropic) -> None:
    chat = [{"role": "system", "content": "Be brief."}, HELLO]
    body = {"model": "tandem-tiny", "messages": chat, "max_tokens": 24, "temperature": 0}
    status, answer = cluster.post("/v1/chat/completions", body)
    assert status == 200, answer
    whole = client.messages.create(**ASK, system="Be brief.", messages=[HELLO])
    assert shown(whole) == answer["choices"][0]["message"]["content"]
    assert whole.usage.output_tokens == answer["usage"]["completion_tokens"]
    with client.messages.stream(**ASK, system="Be brief.", messages=[HELLO]) as stream:
        assert "".join(stream.text_stream) == shown(whole)
        last = stream.get_final_message()
    assert (last.stop_reason, last.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    counted = client.messages.count_tokens(model="tandem-tiny", system="Be brief.", messages=[HELLO])
    assert counted.input_tokens == answer["usage"]["prompt_tokens"]


def test_a_conversation_finds_its_beginning_in_the_cache(client: anthropic.Anthropic) -> None:
    """As Claude Code sends it: a line that changes in every turn first, and a breakpoint that moves."""
    messages: list[Any] = []
    turns = 0

    def cached() -> int:
        nonlocal turns
        turns += 1
        header: Any = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={turns};"}
        lasting: Any = {"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}
        text = {"type": "text", "text": f"Turn {turns}", "cache_control": {"type": "ephemeral"}}
        for message in messages:
            message["content"][-1].pop("cache_control", None)
        messages.append({"role": "user", "content": [text]})
        usage = client.messages.create(**{**ASK, "max_tokens": 4}, system=[header, lasting], messages=messages).usage
        counted = client.messages.count_tokens(model="tandem-tiny", system=[header, lasting], messages=messages)
        cached_tokens = usage.cache_read_input_tokens or 0
        assert usage.input_tokens + cached_tokens == counted.input_tokens
        return cached_tokens

    assert cached() == 0
    wait_for(lambda: cached() > 32, 30, "a later turn finds the system prompt")


def test_a_stop_sequence_ends_the_answer(client: anthropic.Anthropic) -> None:
    text = shown(client.messages.create(**ASK, messages=[HELLO]))
    stop = text[len(text) // 2 :][:3]
    cut = client.messages.create(**ASK, messages=[HELLO], stop_sequences=[stop])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert shown(cut) == text[: text.index(stop)]
