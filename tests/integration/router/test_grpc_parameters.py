"""Every parameter means the same over gRPC as over HTTP: to workers, and in what clients are shown."""

from typing import Any

import grpc
import httpx
import pytest

from tandem.rpc.v1 import inference_pb2 as i
from tandem.rpc.v1 import inference_pb2_grpc as i_grpc
from tests.integration.router.house import RouterHarness
from tests.integration.router.transcript import Whole, completion, responses

PROMPT = "Return a list of the"
NOISY = {"temperature": 1.5, "seed": 11}
LIST = 100
"""A token of some text, to be forbidden, forced or waited for."""


def over_http(shared: RouterHarness, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": PROMPT, "return_token_ids": True, **fields}
    answer = httpx.post(f"{shared.url}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def over_grpc(shared: RouterHarness, **fields: Any) -> list[i.GenerateResponse]:
    return responses(f"127.0.0.1:{shared.ports['grpc']}", completion("tiny", PROMPT, **fields))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_tokens": 3},
        {"temperature": 0},
        {**NOISY, "seed": 12},
        {**NOISY, "top_k": 3},
        {**NOISY, "top_p": 0.5},
        {**NOISY, "min_p": 0.3},
        {**NOISY, "presence_penalty": 2.0},
        {**NOISY, "frequency_penalty": 2.0},
        {**NOISY, "repetition_penalty": 1.5},
        {**NOISY, "n": 3},
        {**NOISY, "n": 2, "best_of": 4},
        {"temperature": 0, "logit_bias": {str(LIST): 100}},
        {"temperature": 0, "logit_bias": {str(LIST): 100}, "stop_token_ids": [LIST]},
        {"temperature": 0, "logit_bias": {str(LIST): 100}, "stop_token_ids": [LIST], "min_tokens": 5},
        {"temperature": 0, "logit_bias": {str(LIST): 100}, "stop_token_ids": [LIST],
         "include_stop_str_in_output": True},
        {"temperature": 0, "allowed_token_ids": [LIST, LIST + 1, LIST + 2]},
        {"temperature": 0, "stop": ["e"]},
        {"temperature": 0, "stop": ["e"], "include_stop_str_in_output": True},
        {"temperature": 0, "echo": True},
        {"temperature": 0, "echo": True, "max_tokens": 0},
        {"temperature": 0, "speculative": False},
        {"temperature": 0, "cache_salt": "a"},
        {"temperature": 0, "prompt_cache_key": "a"},
    ],
    ids=lambda fields: ",".join(name for name in fields if name not in NOISY) or ",".join(fields) or "none",
)  # fmt: skip
def test_the_same_answer(shared: RouterHarness, fields: dict[str, Any]) -> None:
    fields = {**NOISY, "max_tokens": 12, **({} if "stop_token_ids" in fields else {"ignore_eos": True}), **fields}
    answer = over_http(shared, **fields)
    choices, usage = sorted(answer["choices"], key=lambda choice: int(choice["index"])), answer["usage"]
    whole = Whole(over_grpc(shared, **fields))
    assert whole.texts == [choice["text"] for choice in choices]
    assert whole.finishes == [choice["finish_reason"] for choice in choices]
    assert whole.tokens == [choice["token_ids"] for choice in choices]
    assert list(whole.first.prompt_token_ids) == choices[0]["prompt_token_ids"]
    assert whole.usage.prompt_tokens == usage["prompt_tokens"]
    assert whole.usage.completion_tokens == usage["completion_tokens"]
    http, rpc = (submit.sampling for submit in shared.workers["prefill-0"].submitted[-2:])
    assert http == rpc


def test_prediction(shared: RouterHarness) -> None:
    predicted = "a list of the words"
    fields = {"max_tokens": 4, "seed": 1}
    answer = over_http(shared, **fields, prediction={"type": "content", "content": predicted})
    assert answer["usage"]["completion_tokens_details"].keys() == {
        "accepted_prediction_tokens", "rejected_prediction_tokens",
    }  # fmt: skip
    over_grpc(shared, **fields, prediction=predicted)
    http, rpc = (submit.sampling for submit in shared.workers["prefill-0"].submitted[-2:])
    assert http == rpc
    assert len(rpc.prediction) > 3


def test_bad_words(shared: RouterHarness) -> None:
    fields = {"max_tokens": 4, "bad_words": ["word", " two words"]}
    assert over_http(shared, **fields, seed=1)["usage"]["completion_tokens"] == 4
    over_grpc(shared, **fields, seed=1)
    http, rpc = (submit.sampling for submit in shared.workers["prefill-0"].submitted[-2:])
    assert http == rpc
    assert len(rpc.bad_words) == 4  # each at the beginning of a text and behind a space


def test_eos_is_ignored_if_asked(shared: RouterHarness) -> None:
    for ignored in (False, True):
        over_grpc(shared, max_tokens=2, ignore_eos=ignored)
        assert shared.workers["decode-0"].submitted[-1].sampling.ignore_eos == ignored


def test_logprobs(shared: RouterHarness) -> None:
    fields = {"temperature": 0, "max_tokens": 6, "logprobs": 2}
    shown = over_http(shared, **fields)["choices"][0]["logprobs"]
    logprobs = Whole(over_grpc(shared, **fields)).logprobs[0]
    assert [each.logprob for each in logprobs] == pytest.approx(shown["token_logprobs"])
    for each, top in zip(logprobs, shown["top_logprobs"], strict=True):
        assert {value.logprob for value in each.top if value.token != each.token} <= set(top.values())
        assert len(each.top) == 2
    assert not Whole(over_grpc(shared, temperature=0, max_tokens=2)).logprobs[0]


def test_a_chat_of_parts(shared: RouterHarness) -> None:
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": "a list?"}]
    body = {"model": "tiny", "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    messages = [{"role": "user", "content": parts}]
    answer = httpx.post(f"{shared.url}/v1/chat/completions", json={**body, "messages": messages}).json()
    message = i.ChatMessage(role="user", parts=["What is", "a list?"])
    request = i.GenerateRequest(
        model="tiny",
        chat=i.ChatMessages(messages=[message]),
        sampling=i.GenerateSampling(max_tokens=8, temperature=0),
        return_prompt_token_ids=True,
    )
    with grpc.insecure_channel(f"127.0.0.1:{shared.ports['grpc']}") as channel:
        whole = Whole(list(i_grpc.InferenceStub(channel).Generate(request, timeout=60)))
    assert whole.texts == [answer["choices"][0]["message"]["content"]]
    assert list(whole.first.prompt_token_ids) == answer["prompt_token_ids"]
