"""Parameters of the API that no engine receives, through a whole cluster with a real model."""

from typing import Any

from tools.running_cluster import Cluster
from tools.waiting import wait_for

WORDS = "The list of all the words of a language is long. " * 6
START = [{"role": "user", "content": "What is a list?"}, {"role": "assistant", "content": "A list is a"}]


def complete(cluster: Cluster, prompt: Any = WORDS, **more: Any) -> dict[str, Any]:
    return cluster.complete(prompt, 8, ignore_eos=True, **more)


def cached(cluster: Cluster, **more: Any) -> int:
    return int(complete(cluster, **more)["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_requests_of_one_cache_salt_share_blocks_with_nobody_else(cluster: Cluster) -> None:
    words = {"prompt": "Salt: " + WORDS}
    assert cached(cluster, **words, cache_salt="one") == 0
    wait_for(lambda: cached(cluster, **words, cache_salt="one") > 0, 30, "the second request of a salt finds blocks")
    assert cached(cluster, **words, cache_salt="two") == 0
    assert cached(cluster, **words) == 0
    wait_for(lambda: cached(cluster, **words) > 0, 30, "requests without a salt share theirs")
    texts = {complete(cluster, **words, **salt)["choices"][0]["text"] for salt in ({}, {"cache_salt": "one"})}
    assert len(texts) == 1


def test_an_answer_that_goes_on_with_a_message_is_that_of_its_tokens(cluster: Cluster) -> None:
    tokens = cluster.post("/tokenize", {"messages": START, "continue_final_message": True})[1]["tokens"]
    plain = complete(cluster, prompt=tokens)["choices"][0]["text"]
    body = {"model": "tandem-tiny", "messages": START, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    status, answer = cluster.post("/v1/chat/completions", {**body, "continue_final_message": True})
    assert status == 200, answer
    assert answer["choices"][0]["message"]["content"] == plain
    assert cluster.post("/v1/chat/completions", body)[1]["choices"][0]["message"]["content"] != plain
