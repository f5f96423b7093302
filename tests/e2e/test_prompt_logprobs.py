"""Log-probabilities of prompts over HTTP and gRPC are those of transformers, also where the prompt is cached."""

from collections.abc import Callable
from typing import Any

import grpc
import pytest
import torch

from tandem.rpc.v1 import inference_pb2 as i
from tandem.rpc.v1 import inference_pb2_grpc
from tests.integration.worker.pair import MODEL
from tools.running_cluster import Cluster

TEXT = "Return a list of the names of all the files in the folder, and of those that it links to. " * 4
CLOSE = 2e-4
Reference = Callable[[list[int]], torch.Tensor]


@pytest.fixture(scope="module")
def reference() -> Reference:
    """Log-probabilities [tokens, vocab] behind every token of a prompt, computed at once."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, attn_implementation="eager")

    def compute(ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = model(torch.tensor([ids])).logits[0]
        return logits.log_softmax(-1)

    return compute


def check(known: list[Any], ids: list[int], wanted: torch.Tensor, count: int) -> None:
    assert known[0] is None
    assert len(known) == len(ids)
    for entry, token, row in zip(known[1:], ids[1:], wanted, strict=False):
        assert next(iter(entry)) == str(token)
        for key, value in entry.items():
            assert value["logprob"] == pytest.approx(float(row[int(key)]), abs=CLOSE)
            assert float(row.sort(descending=True).values[value["rank"] - 1]) == pytest.approx(
                value["logprob"], abs=CLOSE
            )
        ranks = sorted(value["rank"] for value in entry.values())
        assert ranks[:count] == list(range(1, count + 1))


def test_completions_cold_and_cached(cluster: Cluster, reference: Reference) -> None:
    body = {"model": "tandem-tiny", "prompt": TEXT, "max_tokens": 5, "temperature": 0, "return_token_ids": True}
    plain = cluster.post("/v1/completions", body)[1]
    ids = plain["choices"][0]["prompt_token_ids"]
    assert len(ids) > 64
    for _ in range(2):
        status, answer = cluster.post("/v1/completions", {**body, "prompt_logprobs": 3})
        assert status == 200, answer
        (choice,) = answer["choices"]
        check(choice["prompt_logprobs"], ids, reference(ids), 3)
        assert choice["token_ids"] == plain["choices"][0]["token_ids"]
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "all of it had to be computed"
    again = cluster.post("/v1/completions", body)[1]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64


def test_chat(cluster: Cluster, reference: Reference) -> None:
    body = {"model": "tandem-tiny", "messages": [{"role": "user", "content": "Who?"}], "max_tokens": 3, "n": 2}
    answer = cluster.post("/v1/chat/completions", {**body, "prompt_logprobs": 1, "return_token_ids": True})[1]
    ids = answer["prompt_token_ids"]
    check(answer["prompt_logprobs"], ids, reference(ids), 1)


def test_echo_says_how_probable_a_text_is(cluster: Cluster, reference: Reference) -> None:
    """As evaluation harnesses ask: nothing but the prompt."""
    body = {"model": "tandem-tiny", "prompt": TEXT, "max_tokens": 0, "echo": True, "logprobs": 1}
    answer = cluster.post("/v1/completions", {**body, "return_token_ids": True})[1]
    (choice,) = answer["choices"]
    ids, known = choice["prompt_token_ids"], choice["logprobs"]
    assert (choice["text"], answer["usage"]["completion_tokens"]) == (TEXT, 0)
    wanted = [float(row[token]) for row, token in zip(reference(ids), ids[1:], strict=False)]
    assert known["token_logprobs"][0] is None
    assert known["token_logprobs"][1:] == pytest.approx(wanted, abs=CLOSE)
    ends = [*known["text_offset"][1:], len(TEXT)]
    shown = [TEXT[a:b] for a, b in zip(known["text_offset"], ends, strict=True)]
    assert shown[1:] == known["tokens"][1:]


def test_grpc(cluster: Cluster, reference: Reference) -> None:
    sampling = i.GenerateSampling(max_tokens=2, temperature=0, prompt_logprobs=2)
    request = i.GenerateRequest(model="tandem-tiny", text=TEXT, sampling=sampling, return_prompt_token_ids=True)
    with grpc.insecure_channel(cluster.context["grpc"]) as channel:
        first = next(iter(inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=60)))
    ids, rows = list(first.prompt_token_ids), reference(list(first.prompt_token_ids))
    assert [each.token for each in first.prompt_logprobs] == ids[1:]
    for each, row in zip(first.prompt_logprobs, rows, strict=False):
        assert each.logprob == pytest.approx(float(row[each.token]), abs=CLOSE)
        assert [top.logprob for top in each.top] == pytest.approx(row.topk(2).values.tolist(), abs=CLOSE)
