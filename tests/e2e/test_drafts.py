"""Drafts from a client's prediction and from repeated text, over a hand-off: the same answers, in fewer steps."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.integration.router.transcript import Whole, completion, responses
from tools.running_cluster import Cluster, running
from tools.waiting import wait_for

MODEL = "tandem-tiny"
ASK: Any = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Count the words."}],
    "temperature": 0,
    "max_tokens": 80,
    "extra_body": {"ignore_eos": True},
}
ACCEPTED = "tandem_spec_decode_num_accepted_tokens_total"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    flags = (
        "--prefill",
        "1",
        "--decode",
        "1",
        "--disaggregation",
        "always",
        "--dtype",
        "float32",
        "--quantize",
        "none",
    )
    with running(*flags, "--deterministic", "--speculation", "copy") as found:
        yield found


@pytest.fixture
def client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.api}/v1", api_key="none", max_retries=0) as found:
        yield found


@pytest.fixture
def plain(client: openai.OpenAI) -> str:
    """The answer without drafts."""
    body = {**ASK["extra_body"], "speculative": False}
    return str(client.chat.completions.create(**{**ASK, "extra_body": body}).choices[0].message.content)


def test_a_prediction_changes_no_answer_and_is_counted(client: openai.OpenAI, plain: str) -> None:
    predicted = plain[:60] + "something else" + plain[70:]
    done = client.chat.completions.create(**ASK, prediction={"type": "content", "content": predicted})
    assert done.choices[0].message.content == plain
    assert done.usage is not None
    details = done.usage.completion_tokens_details
    assert details is not None
    assert details.accepted_prediction_tokens is not None
    assert details.rejected_prediction_tokens is not None
    assert 20 < details.accepted_prediction_tokens < 80
    assert details.rejected_prediction_tokens > 0


def test_a_prediction_in_parts_and_a_stream(client: openai.OpenAI, plain: str) -> None:
    parts: Any = [{"type": "text", "text": plain[:40]}, {"type": "text", "text": plain[40:]}]
    stream = client.chat.completions.create(
        **ASK, stream=True, stream_options={"include_usage": True}, prediction={"type": "content", "content": parts}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == plain
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens_details is not None
    details = usage.completion_tokens_details
    assert details.accepted_prediction_tokens is not None
    assert details.accepted_prediction_tokens > 50, "its tokens are not all the answer's: a text has many spellings"


def test_drafts_of_the_decode_worker_are_counted(cluster: Cluster, client: openai.OpenAI, plain: str) -> None:
    before = cluster.metric(ACCEPTED)
    client.chat.completions.create(**ASK, prediction={"type": "content", "content": plain})
    wait_for(lambda: cluster.metric(ACCEPTED) > before + 20, 30, "the drafts are counted")


def test_an_answer_that_repeats_the_prompt_is_the_same(client: openai.OpenAI) -> None:
    ask = {**ASK, "messages": [{"role": "user", "content": "one two three four five six " * 12}]}
    texts = {
        str(client.chat.completions.create(
            **{**ask, "extra_body": {"ignore_eos": True, "speculative": is_drafted}}
        ).choices[0].message.content) for is_drafted in (True, False)
    }  # fmt: skip
    assert len(texts) == 1


def test_over_grpc(cluster: Cluster) -> None:
    asked: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    address = cluster.context["grpc"]
    plain = Whole(responses(address, completion(MODEL, "A list of", speculative=False, **asked)))
    drafted = Whole(responses(address, completion(MODEL, "A list of", prediction=plain.texts[0], **asked)))
    assert drafted.texts == plain.texts
