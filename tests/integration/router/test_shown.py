"""Parts of answers besides new text: echoed prompts, log-probabilities of prompts, token ids, the best of several."""

import json
from typing import Any

import grpc
import httpx
import pytest
from tokenizers import Tokenizer

from tandem.rpc.v1 import inference_pb2 as i
from tandem.rpc.v1 import inference_pb2_grpc as i_grpc
from tandem.rpc.v1 import worker_pb2 as w
from tests.integration.router.house import MODEL, Build, RouterHarness
from tests.integration.router.scripted_worker import Script

PROMPT = "Return a list of the names"
TOKENIZER = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
IDS = TOKENIZER.encode(PROMPT).ids
BOS = "<|bos|>"
WORDS = [TOKENIZER.decode([token], skip_special_tokens=False) for token in IDS]


def complete(house: RouterHarness, **body: Any) -> dict[str, Any]:
    common = {"model": "tiny", "prompt": PROMPT, "max_tokens": 6}
    answer = httpx.post(f"{house.url}/v1/completions", json={**common, **body}, timeout=30)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def chat(house: RouterHarness, **body: Any) -> dict[str, Any]:
    common = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6}
    answer = httpx.post(f"{house.url}/v1/chat/completions", json={**common, **body}, timeout=30)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def stream(house: RouterHarness, path: str, **body: Any) -> list[dict[str, Any]]:
    common = {"model": "tiny", "max_tokens": 6, "stream": True}
    answer = httpx.post(f"{house.url}{path}", json={**common, **body}, timeout=30)
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]", answer.text
    return [json.loads(line) for line in lines[:-1]]


def generate(house: RouterHarness, request: i.GenerateRequest) -> list[i.GenerateResponse]:
    with grpc.insecure_channel(f"127.0.0.1:{house.ports['grpc']}") as channel:
        return list(i_grpc.InferenceStub(channel).Generate(request, timeout=15))


def said(house: RouterHarness, choice: int = 0) -> list[int]:
    """Return the workers' answer to PROMPT."""
    submit = next(s for s in house.workers["prefill-0"].submitted[::-1] if list(s.prompt) == IDS)
    return house.workers["prefill-0"].script.answer(submit, choice)


# ---- echo ----------------------------------------------------------------------------------------------------------


def test_echo(shared: RouterHarness) -> None:
    plain = complete(shared, seed=1)["choices"][0]["text"]
    for prompt, shown in ((PROMPT, PROMPT), (IDS, BOS + PROMPT)):
        answer = complete(shared, prompt=prompt, echo=True, seed=1)
        assert answer["choices"][0]["text"] == shown + plain
        assert answer["usage"]["completion_tokens"] == 6
    both = complete(shared, prompt=[PROMPT, "Hi"], echo=True, n=2)["choices"]
    assert [choice["text"].startswith(text) for choice, text in zip(both, [PROMPT] * 2 + ["Hi"] * 2, strict=True)]
    parts = stream(shared, "/v1/completions", prompt=PROMPT, echo=True, seed=1)
    assert "".join(part["choices"][0]["text"] for part in parts) == PROMPT + plain


def test_a_stop_string_in_the_prompt_stops_nothing(shared: RouterHarness) -> None:
    choice = complete(shared, echo=True, stop="list")["choices"][0]
    assert choice["text"].startswith(PROMPT)
    assert choice["finish_reason"] == "length"


def test_echo_with_logprobs(shared: RouterHarness) -> None:
    text = complete(shared, seed=1, logprobs=2, echo=True)["choices"][0]
    logprobs = text["logprobs"]
    assert logprobs["tokens"][: len(IDS)] == WORDS
    assert "".join(logprobs["tokens"]) == BOS + text["text"]
    assert logprobs["token_logprobs"][: len(IDS)] == [None, *(-place / 8 for place in range(1, len(IDS)))]
    assert logprobs["top_logprobs"][0] is None
    assert [len(top) for top in logprobs["top_logprobs"][1:]] == [3] * (len(IDS) - 1) + [2] * 6
    offsets = logprobs["text_offset"]
    ends = [*offsets[1:], len(text["text"])]
    assert [text["text"][a:b] for a, b in zip(offsets, ends, strict=True)][1:] == logprobs["tokens"][1:]
    assert offsets[:2] == [0, 0]
    plain = complete(shared, seed=1, logprobs=2)["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"][len(IDS) :] == plain["token_logprobs"]
    assert [offset - len(PROMPT) for offset in offsets[len(IDS) :]] == plain["text_offset"]


def test_echo_with_logprobs_in_a_stream(shared: RouterHarness) -> None:
    parts = stream(shared, "/v1/completions", prompt=PROMPT, echo=True, logprobs=0, seed=1)
    whole = complete(shared, echo=True, logprobs=0, seed=1)["choices"][0]
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        pieces = [part["choices"][0]["logprobs"][name] for part in parts if part["choices"][0]["logprobs"]]
        assert [entry for piece in pieces for entry in piece] == whole["logprobs"][name]


@pytest.mark.parametrize("logprobs", [None, 1])
def test_echo_alone(shared: RouterHarness, logprobs: int | None) -> None:
    answer = complete(shared, echo=True, max_tokens=0, logprobs=logprobs)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == len(IDS)
    if logprobs:
        assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["text_offset"]) == len(IDS)
    shared.wait(lambda: not shared.router.dispatcher.flights)


def test_offsets_of_a_prompt_with_split_characters(shared: RouterHarness) -> None:
    prompt = "naïve 🎉 party – 東京"
    choice = complete(shared, prompt=prompt, echo=True, max_tokens=0, logprobs=0)["choices"][0]
    assert choice["text"] == prompt
    offsets = choice["logprobs"]["text_offset"]
    assert offsets == sorted(offsets)
    assert len(offsets) == len(TOKENIZER.encode(prompt).ids)
    for offset, token in list(zip(offsets, choice["logprobs"]["tokens"], strict=True))[1:]:
        if not token.startswith("bytes:"):
            assert prompt[offset:].startswith(token)


# ---- prompt_logprobs -----------------------------------------------------------------------------------------------


def check_prompt(known: list[Any], ids: list[int], count: int) -> None:
    assert known[0] is None
    assert len(known) == len(ids)
    for place, (entry, token) in enumerate(zip(known, ids, strict=True)):
        if place == 0:
            continue
        assert [int(key) for key in entry] == [token, *((token + n) % 4096 for n in range(1, count + 1))]
        own = entry[str(token)]
        assert own == {
            "logprob": -place / 8,
            "rank": count + 1,
            "decoded_token": WORDS[place] if ids == IDS else own["decoded_token"],
        }
        assert [other["rank"] for other in entry.values()][1:] == list(range(1, count + 1))


@pytest.mark.parametrize("count", [0, 1, 20])
def test_prompt_logprobs_of_completions(shared: RouterHarness, count: int) -> None:
    answer = complete(shared, prompt_logprobs=count, n=2)
    for choice in answer["choices"]:
        check_prompt(choice["prompt_logprobs"], IDS, count)
        assert choice["logprobs"] is None
    assert "prompt_logprobs" not in complete(shared)["choices"][0]


def test_prompt_logprobs_of_chats(shared: RouterHarness) -> None:
    answer = chat(shared, prompt_logprobs=2, return_token_ids=True)
    check_prompt(answer["prompt_logprobs"], answer["prompt_token_ids"], 2)
    assert "prompt_logprobs" not in answer["choices"][0]


def test_prompt_logprobs_beside_echo(shared: RouterHarness) -> None:
    choice = complete(shared, prompt_logprobs=3, echo=True, logprobs=1)["choices"][0]
    check_prompt(choice["prompt_logprobs"], IDS, 3)
    assert [len(top) for top in choice["logprobs"]["top_logprobs"][1 : len(IDS)]] == [2] * (len(IDS) - 1)


# ---- token ids -----------------------------------------------------------------------------------------------------


def test_token_ids(shared: RouterHarness) -> None:
    answer = complete(shared, return_token_ids=True, n=2)
    for index, choice in enumerate(answer["choices"]):
        assert (choice["prompt_token_ids"], choice["token_ids"]) == (IDS, said(shared, index))
    answer = chat(shared, return_token_ids=True)
    assert len(answer["choices"][0]["token_ids"]) == 6
    assert "prompt_token_ids" not in answer["choices"][0]
    assert "token_ids" not in complete(shared)["choices"][0]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_token_ids_in_a_stream(shared: RouterHarness, path: str) -> None:
    prompt: dict[str, Any] = {"prompt": [PROMPT, "Hi"]}
    if "chat" in path:
        prompt = {"messages": [{"role": "user", "content": "Hi"}], "n": 2}
    parts = stream(shared, path, return_token_ids=True, stop=["never to be seen"], **prompt)
    ids: dict[int, list[int]] = {0: [], 1: []}
    prompts: list[list[int]] = []
    for part in parts:
        (choice,) = part["choices"]
        ids[choice["index"]] += choice.get("token_ids", [])
        prompts += [found for found in (part.get("prompt_token_ids"), choice.get("prompt_token_ids")) if found]
    assert [len(found) for found in ids.values()] == [6, 6]
    assert len(prompts) == 2
    if "chat" not in path:
        assert sorted(prompts, key=len) == sorted([IDS, TOKENIZER.encode("Hi").ids], key=len)


# ---- best_of -------------------------------------------------------------------------------------------------------


def test_best_of(build: Build) -> None:
    """The scripted workers give every token the same probability: then the first choices are the best."""
    house = build()
    house.wait_ready()
    answer = complete(house, best_of=4, n=2, return_token_ids=True)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert [choice["token_ids"] for choice in answer["choices"]] == [said(house, 0), said(house, 1)]
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 24
    many = complete(house, prompt=[PROMPT, "Hi"], best_of=3)
    assert [choice["index"] for choice in many["choices"]] == [0, 1]
    assert complete(house, best_of=2, n=2, logprobs=1)["choices"][1]["logprobs"] is not None
    assert len(stream(house, "/v1/completions", prompt=PROMPT, best_of=1)) > 1


# ---- gRPC ----------------------------------------------------------------------------------------------------------


def test_grpc_shows_the_same(shared: RouterHarness) -> None:
    sampling = i.GenerateSampling(max_tokens=6, seed=1, prompt_logprobs=2)
    request = i.GenerateRequest(model="tiny", text=PROMPT, sampling=sampling, echo=True, return_prompt_token_ids=True)
    responses = generate(shared, request)
    text = "".join(delta.text for response in responses for delta in response.choices)
    assert text == complete(shared, seed=1, echo=True)["choices"][0]["text"]
    first = responses[0]
    assert list(first.prompt_token_ids) == IDS
    assert [each.token for each in first.prompt_logprobs] == IDS[1:]
    assert [each.logprob for each in first.prompt_logprobs] == [-place / 8 for place in range(1, len(IDS))]
    assert {len(each.top) for each in first.prompt_logprobs} == {2}
    assert not any(response.prompt_logprobs or response.prompt_token_ids for response in responses[1:])


def test_grpc_best_of(shared: RouterHarness) -> None:
    sampling = i.GenerateSampling(max_tokens=6, seed=1, n=2, best_of=4)
    responses = generate(shared, i.GenerateRequest(model="tiny", text=PROMPT, sampling=sampling))
    assert len(responses) == 2
    assert [delta.index for delta in responses[0].choices] == [0, 1]
    assert not any(delta.logprobs for delta in responses[0].choices)
    whole = complete(shared, seed=1, n=2, best_of=4)
    assert [delta.text for delta in responses[0].choices] == [choice["text"] for choice in whole["choices"]]
    assert responses[1].usage.completion_tokens == whole["usage"]["completion_tokens"] == 24


def improbable(submit: w.Submit, choice: int) -> list[int]:
    return [300 + choice] * submit.sampling.max_tokens


def test_the_same_answers_whoever_is_asked(build: Build) -> None:
    house = build(prefill=0, decode=0, mixed=1, script=Script(answer=improbable))
    house.wait_ready()
    answer = complete(house, echo=True, logprobs=1, prompt_logprobs=1, return_token_ids=True, n=2)
    for index, choice in enumerate(answer["choices"]):
        check_prompt(choice["prompt_logprobs"], IDS, 1)
        assert choice["token_ids"] == [300 + index] * 6
