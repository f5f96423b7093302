"""The `openai` client reads every kind of answer."""

from typing import Any

import httpx
import openai
import pytest

from tandem.router.tokenization.tokenizer import Tokenizer
from tests.integration.router.house import MODEL, RouterHarness

MESSAGES: Any = [{"role": "user", "content": "Say something."}]


@pytest.fixture
def client(shared: RouterHarness) -> Any:
    with openai.OpenAI(base_url=f"{shared.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_chat_whole(client: openai.OpenAI, shared: RouterHarness) -> None:
    answer = client.chat.completions.create(model="tandem-tiny", messages=MESSAGES, max_tokens=12, temperature=0)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    worker = shared.workers["decode-0"]
    tokens = worker.script.answer(worker.submitted[-1], 0)
    assert answer.choices[0].message.content == Tokenizer.load(MODEL).decode(tokens)


def test_chat_stream_says_the_same(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 20, "temperature": 0, "n": 2}
    whole = client.chat.completions.create(**ask)
    texts, finishes, roles, usage = ["", ""], ["", ""], [0, 0], None
    for chunk in client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            roles[choice.index] += choice.delta.role == "assistant"
            texts[choice.index] += choice.delta.content or ""
            finishes[choice.index] += choice.finish_reason or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert finishes == ["length", "length"]
    assert roles == [1, 1]
    assert usage is not None
    assert usage.completion_tokens == 40
    assert usage.prompt_tokens_details is not None


def test_completion_kinds_of_prompt(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="Hello", temperature=0)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16
    ids = [0, *Tokenizer.load(MODEL).encode_now("Hello", add_special_tokens=False)]
    by_ids = client.completions.create(model="tiny", prompt=ids, temperature=0)
    assert by_ids.choices[0].text == answer.choices[0].text
    many = client.completions.create(model="tiny", prompt=["Hello", "Good bye"], temperature=0, n=2)
    assert [choice.index for choice in many.choices] == [0, 1, 2, 3]
    assert many.choices[0].text == answer.choices[0].text
    streamed = ["", "", "", ""]
    for chunk in client.completions.create(model="tiny", prompt=["Hello", "Good bye"], temperature=0, n=2, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == [choice.text for choice in many.choices]


def test_one_token(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="Hello", max_tokens=1)
    assert answer.choices[0].finish_reason == "length"


def test_logprobs(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=5, logprobs=True, top_logprobs=2, temperature=0
    )
    logprobs = chat.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [len(entry.top_logprobs) for entry in logprobs.content] == [2] * 5
    assert b"".join(bytes(entry.bytes or []) for entry in logprobs.content).decode() == chat.choices[0].message.content
    text = client.completions.create(model="tiny", prompt="Hello", max_tokens=5, logprobs=3, temperature=0)
    shown = text.choices[0].logprobs
    assert shown is not None
    assert shown.tokens is not None
    assert shown.top_logprobs is not None
    assert len(shown.tokens) == len(shown.token_logprobs or []) == len(shown.text_offset or []) == 5
    assert [len(top) for top in shown.top_logprobs] == [3] * 5


def test_seed_is_fixed_by_the_router(client: openai.OpenAI, shared: RouterHarness) -> None:
    client.completions.create(model="tiny", prompt="a", max_tokens=2)
    client.completions.create(model="tiny", prompt="a", max_tokens=2)
    client.completions.create(model="tiny", prompt="a", max_tokens=2, seed=-5)
    first, second, third = (submit.sampling.seed for submit in shared.workers["decode-0"].submitted[-3:])
    assert first != second
    assert third == -5


def test_extra_fields_reach_the_worker(client: openai.OpenAI, shared: RouterHarness) -> None:
    client.completions.create(
        model="tiny",
        prompt="a",
        max_tokens=2,
        logit_bias={"7": -3},
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        extra_body={"top_k": 9, "min_p": 0.1, "repetition_penalty": 1.5, "stop_token_ids": [5], "ignore_eos": True},
    )
    sampling = shared.workers["decode-0"].submitted[-1].sampling
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (9, 0.1, 1.5)
    assert list(sampling.stop_token_ids) == [5]
    assert sampling.ignore_eos
    assert dict(sampling.logit_bias) == {7: -3.0}


def test_what_other_servers_show_is_readable(client: openai.OpenAI) -> None:
    shown: dict[str, Any] = {"return_token_ids": True, "prompt_logprobs": 1, "min_tokens": 1, "bad_words": ["no"]}
    chat = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=4, extra_body=shown)
    assert chat.model_extra is not None
    assert len(chat.model_extra["prompt_logprobs"]) == len(chat.model_extra["prompt_token_ids"])
    assert chat.choices[0].model_extra is not None
    assert len(chat.choices[0].model_extra["token_ids"]) == 4
    text = client.completions.create(
        model="tiny", prompt="Hello", max_tokens=4, echo=True, logprobs=1, best_of=3, n=2, extra_body=shown
    )
    assert [choice.text.startswith("Hello") for choice in text.choices] == [True, True]
    logprobs = text.choices[1].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs or []) == len(logprobs.text_offset or []) == 6
    assert text.usage is not None
    assert text.usage.completion_tokens == 12


def test_models_and_tokenize(client: openai.OpenAI, shared: RouterHarness) -> None:
    assert [model.id for model in client.models.list()] == ["tandem-tiny", "tiny"]
    assert client.models.retrieve("tiny").owned_by == "tandem"
    tokens = httpx.post(f"{shared.url}/tokenize", json={"prompt": "Hello"}).json()
    assert tokens["count"] == len(tokens["tokens"])
    assert tokens["tokens"][0] == 0
    text = httpx.post(f"{shared.url}/detokenize", json={"tokens": tokens["tokens"][1:]}).json()
    assert text == {"prompt": "Hello"}
    chat = httpx.post(f"{shared.url}/tokenize", json={"model": "tiny", "messages": MESSAGES}).json()
    assert chat["count"] > 3


def test_every_answer_crosses_and_hashes_agree(client: openai.OpenAI, shared: RouterHarness) -> None:
    client.completions.create(model="tiny", prompt="word " * 100, max_tokens=3)
    prefill, decode = shared.workers["prefill-0"], shared.workers["decode-0"]
    assert prefill.submitted[-1].request == decode.submitted[-1].request
    assert prefill.submitted[-1].peer.worker == "decode-0"
    assert decode.submitted[-1].peer.incarnation == prefill.incarnation
    assert prefill.submitted[-1].last_block_hash
    assert not prefill.hash_mismatches
    assert not decode.hash_mismatches


def test_timing_comment(shared: RouterHarness) -> None:
    body = {"model": "tiny", "prompt": "a", "max_tokens": 4, "stream": True}
    text = httpx.post(f"{shared.url}/v1/completions", json=body, headers={"x-tandem-timing": "1"}).text
    lines = [line for line in text.splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    assert lines[-2].startswith(": tandem-timing {")
    assert '"overhead_s"' in lines[-2]
    assert "tandem-timing" not in httpx.post(f"{shared.url}/v1/completions", json=body).text


def test_metrics_and_status(shared: RouterHarness) -> None:
    assert shared.metric("tandem_requests_total") > 0
    assert shared.metric("tandem_handoff_overhead_seconds_count") > 0
    assert httpx.get(f"{shared.url}/livez").status_code == 200
    assert httpx.get(f"{shared.url}/readyz").json() == {"status": "ready", "missing": []}
    status = shared.status()
    assert status["is_ready"]
    assert [worker["role"] for worker in status["workers"]] == ["decode", "prefill"]
    assert status["router"]["in_flight"] == 0
