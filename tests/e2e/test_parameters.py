"""Every parameter that is accepted has its effect, over HTTP, on answers that cross from prefill to decode."""

import math
from itertools import pairwise
from typing import Any

import pytest

from tests.e2e.questions import NOISY, PROMPT, ids, model_config
from tools.running_cluster import Cluster


@pytest.fixture(scope="module")
def ask(cluster: Cluster) -> Any:
    """Choices of a completion of PROMPT that goes on for `max_tokens`."""

    def complete(**more: Any) -> list[dict[str, Any]]:
        body = {"model": "tandem-tiny", "prompt": PROMPT, "max_tokens": 12, "ignore_eos": True, **more}
        status, answer = cluster.post("/v1/completions", body)
        assert status == 200, answer
        return sorted(answer["choices"], key=lambda choice: int(choice["index"]))

    return complete


@pytest.fixture(scope="module")
def greedy(ask: Any) -> str:
    return str(ask(temperature=0)[0]["text"])


def test_seed_fixes_an_answer_and_changes_it(ask: Any) -> None:
    texts = [ask(temperature=1.5, seed=seed)[0]["text"] for seed in (1, 1, 2, -1)]
    assert texts[0] == texts[1]
    assert len(set(texts)) == 3
    assert ask(temperature=1.5)[0]["text"] != ask(temperature=1.5)[0]["text"]


def test_temperature(ask: Any, greedy: str) -> None:
    assert ask(temperature=0, seed=1)[0]["text"] == ask(temperature=0, seed=2)[0]["text"] == greedy
    assert ask(temperature=1e-6, seed=1)[0]["text"] == greedy
    assert ask(**NOISY)[0]["text"] != greedy


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}])
def test_filters_leave_the_best_token_alone(ask: Any, greedy: str, narrow: dict[str, Any]) -> None:
    assert ask(**NOISY, **narrow)[0]["text"] == greedy


@pytest.mark.parametrize("wide", [{"top_k": 0}, {"top_k": -1}, {"top_p": 1.0}, {"min_p": 0.0}])
def test_filters_that_are_off(ask: Any, wide: dict[str, Any]) -> None:
    assert ask(**NOISY, **wide)[0]["text"] == ask(**NOISY)[0]["text"]


def test_n_gives_as_many_different_answers(ask: Any) -> None:
    choices = ask(**NOISY, n=4)
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert len({choice["text"] for choice in choices}) == 4
    assert choices[0]["text"] == ask(**NOISY)[0]["text"]


def test_max_tokens(cluster: Cluster, ask: Any) -> None:
    for count in (1, 2, 40):
        (choice,) = ask(max_tokens=count, logprobs=0, temperature=0)
        assert choice["finish_reason"] == "length"
        assert len(choice["logprobs"]["tokens"]) == count
    body = {"model": "tandem-tiny", "messages": [{"role": "user", "content": "Hi"}], "ignore_eos": True}
    for name in ("max_tokens", "max_completion_tokens"):
        assert cluster.post("/v1/chat/completions", {**body, name: 5})[1]["usage"]["completion_tokens"] == 5


def test_logit_bias_forces_and_forbids(cluster: Cluster, ask: Any) -> None:
    first, second = ids(cluster, " list")[0], ids(cluster, " the")[0]
    texts = [cluster.post("/detokenize", {"tokens": [token]})[1]["prompt"] for token in (first, second)]
    both = {str(first): 100, str(second): 80}
    assert ask(temperature=0, logit_bias=both, max_tokens=4)[0]["text"] == texts[0] * 4
    assert ask(temperature=0, logit_bias={**both, str(first): -100}, max_tokens=4)[0]["text"] == texts[1] * 4


def test_stop_ends_before_the_text(ask: Any, greedy: str) -> None:
    for stop in (greedy[5:8], ["never to be seen", greedy[5:8]]):
        (choice,) = ask(temperature=0, stop=stop)
        assert choice["finish_reason"] == "stop"
        assert choice["text"] == greedy[: greedy.index(greedy[5:8])]


def test_stop_token_ids(cluster: Cluster, ask: Any, greedy: str) -> None:
    token = ids(cluster, " list")[0]
    (choice,) = ask(temperature=0, stop_token_ids=[token], logit_bias={str(token): 100})
    assert choice["finish_reason"] == "stop"
    assert choice["text"] != greedy


def test_eos_ends_unless_ignored(ask: Any) -> None:
    eos = model_config()["eos_token_id"]
    forced = {"temperature": 0, "logit_bias": {str(eos): 100}}
    assert (ask(**forced, ignore_eos=False)[0]["finish_reason"], ask(**forced)[0]["finish_reason"]) == (
        "stop",
        "length",
    )


def test_logprobs(ask: Any) -> None:
    (choice,) = ask(temperature=0, logprobs=3)
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == 12
    for token, value, top in zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert top[token] == value == max(top.values()) <= 0
        assert len(top) == 3
        assert sum(map(math.exp, top.values())) <= 1 + 1e-6
    assert ask(temperature=0)[0]["logprobs"] is None


def test_chat_logprobs(cluster: Cluster) -> None:
    body = {"model": "tandem-tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0}
    answer = cluster.post("/v1/chat/completions", {**body, "logprobs": True, "top_logprobs": 2})[1]["choices"][0]
    for entry in answer["logprobs"]["content"]:
        assert entry["top_logprobs"][0]["token"] == entry["token"]
        assert len(entry["top_logprobs"]) == 2


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_penalties_vary_the_tokens(ask: Any, name: str) -> None:
    def different(penalty: float) -> int:
        return len(set(ask(temperature=0, max_tokens=80, logprobs=0, **{name: penalty})[0]["logprobs"]["tokens"]))

    assert different(-2.0) < different(2.0)


def test_repetition_penalty_counts_the_prompt(ask: Any, greedy: str) -> None:
    assert ask(temperature=0, repetition_penalty=1.0)[0]["text"] == greedy
    assert ask(temperature=0, repetition_penalty=2.0)[0]["text"] != greedy


def test_prompts_as_text_ids_and_lists(cluster: Cluster, ask: Any, greedy: str) -> None:
    tokens = cluster.post("/tokenize", {"prompt": PROMPT})[1]["tokens"]
    for prompt in ([PROMPT], tokens, [tokens]):
        assert ask(prompt=prompt, temperature=0)[0]["text"] == greedy
    assert [choice["text"] for choice in ask(prompt=[PROMPT, PROMPT], temperature=0)] == [greedy, greedy]


def test_min_tokens_holds_back_every_end(cluster: Cluster, ask: Any, greedy: str) -> None:
    eos = model_config()["eos_token_id"]
    stop = ids(cluster, " list")[0]
    both = {"logit_bias": {str(eos): 90, str(stop): 100}, "temperature": 0, "ignore_eos": False}
    body = {"model": "tandem-tiny", "prompt": PROMPT, "max_tokens": 12, "stop_token_ids": [stop], **both}
    for count in (0, 1, 5, 11):
        _, answer = cluster.post("/v1/completions", {**body, "min_tokens": count})
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == count + 1
    assert cluster.post("/v1/completions", {**body, "min_tokens": 12})[1]["choices"][0]["finish_reason"] == "length"
    (choice,) = ask(temperature=0, stop=greedy[5:8], min_tokens=12)
    assert (choice["finish_reason"], choice["text"]) == ("length", greedy)


def test_bad_words(cluster: Cluster, ask: Any) -> None:
    said = ask(temperature=0, logprobs=0)[0]["logprobs"]["tokens"]
    for token in said[:4]:
        instead = ask(temperature=0, logprobs=0, bad_words=[token])[0]["logprobs"]["tokens"]
        place = min(said.index(word) for word in {token, token.lstrip(" "), f" {token.lstrip(' ')}"} if word in said)
        assert instead[:place] == said[:place]
        assert not {token, token.lstrip(" "), f" {token.lstrip(' ')}"} & set(instead)
    pair = next(pair for pair in pairwise(said) if len(ids(cluster, "".join(pair))) == 2)
    instead = ask(temperature=0, logprobs=0, bad_words=["".join(pair)])[0]["logprobs"]["tokens"]
    assert pair[0] in instead, "only the last token of a sequence is forbidden"
    assert pair not in pairwise(instead)


def test_allowed_token_ids(cluster: Cluster, ask: Any, greedy: str) -> None:
    allowed = ids(cluster, " list the a b c")
    (choice,) = ask(**NOISY, max_tokens=60, logprobs=0, allowed_token_ids=allowed)
    texts = {cluster.post("/detokenize", {"tokens": [token]})[1]["prompt"] for token in allowed}
    assert len(choice["logprobs"]["tokens"]) == 60
    assert set(choice["logprobs"]["tokens"]) <= texts
    assert len(set(choice["logprobs"]["tokens"])) > 1
    everything = list(range(model_config()["vocab_size"]))
    assert ask(temperature=0, allowed_token_ids=everything)[0]["text"] == greedy


def test_include_stop_str_in_output(cluster: Cluster, ask: Any, greedy: str) -> None:
    stops = [f"never {number}" for number in range(15)] + [greedy[5:8]]
    (choice,) = ask(temperature=0, stop=stops, include_stop_str_in_output=True)
    assert choice["finish_reason"] == "stop"
    assert choice["text"] == greedy[: greedy.index(greedy[5:8]) + 3]
    token = ids(cluster, " list")[0]
    body = {"stop_token_ids": [token], "logit_bias": {str(token): 100}, "temperature": 0}
    assert ask(**body)[0]["text"] == ""
    text = cluster.post("/detokenize", {"tokens": [token]})[1]["prompt"]
    assert ask(**body, include_stop_str_in_output=True)[0]["text"] == text


def test_best_of(cluster: Cluster, ask: Any) -> None:
    every = ask(**NOISY, n=4, logprobs=0)
    order = sorted(every, key=lambda choice: -sum(choice["logprobs"]["token_logprobs"]))
    best = ask(**NOISY, n=2, best_of=4)
    assert [choice["text"] for choice in best] == [choice["text"] for choice in order[:2]]
    body = {"model": "tandem-tiny", "prompt": PROMPT, "max_tokens": 12, "ignore_eos": True, "best_of": 3}
    assert cluster.post("/v1/completions", body)[1]["usage"]["completion_tokens"] == 36


def test_echo_and_token_ids(cluster: Cluster, ask: Any, greedy: str) -> None:
    (choice,) = ask(temperature=0, echo=True, return_token_ids=True)
    assert choice["text"] == PROMPT + greedy
    assert choice["prompt_token_ids"] == cluster.post("/tokenize", {"prompt": PROMPT})[1]["tokens"]
    assert cluster.post("/detokenize", {"tokens": choice["token_ids"]})[1]["prompt"] == greedy


def test_a_stop_string_ends_one_choice_of_several(cluster: Cluster, ask: Any) -> None:
    every = ask(**NOISY, n=3, max_tokens=200)
    stop = every[1]["text"][8:20]
    stopped = ask(**NOISY, n=3, max_tokens=200, stop=stop)
    for before, after in zip(every, stopped, strict=True):
        assert after["text"] == before["text"].partition(stop)[0]
        assert after["finish_reason"] == ("stop" if stop in before["text"] else "length")
