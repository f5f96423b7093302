"""gRPC through a whole cluster with a real model: HTTP's answers; deadlines and cancellation free everything."""

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from tandem.rpc.v1 import inference_pb2 as i
from tandem.rpc.v1 import inference_pb2_grpc as i_grpc
from tests.e2e.questions import NOISY, PROMPT, ids, model_config
from tests.integration.router.transcript import Whole, completion, responses
from tools.running_cluster import Cluster, is_free
from tools.waiting import wait_for

MODEL = "tandem-tiny"
ENDLESS = {"temperature": 0, "ignore_eos": True, "max_tokens": 3000, "n": 4}
"""Takes many seconds on any machine."""
CLOSE = 2e-4
GREEDY = {"temperature": 0, "ignore_eos": True}


def over_http(cluster: Cluster, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": PROMPT, "return_token_ids": True, "max_tokens": 12, **fields}
    status, answer = cluster.post("/v1/completions", body)
    assert status == 200, answer
    answer["choices"].sort(key=lambda choice: int(choice["index"]))
    return answer


def over_grpc(cluster: Cluster, **fields: Any) -> Whole:
    return Whole(responses(cluster.context["grpc"], completion(MODEL, PROMPT, **{"max_tokens": 12, **fields})))


@pytest.fixture(scope="module")
def word(cluster: Cluster) -> int:
    """A token that the model may choose."""
    return ids(cluster, " list")[0]


@pytest.fixture(scope="module")
def piece(cluster: Cluster) -> str:
    """Return a piece of the greedy answer, from its middle."""
    return str(over_http(cluster, **GREEDY)["choices"][0]["text"][5:8])


def same(cluster: Cluster, **fields: Any) -> Whole:
    """Return the answer, which both APIs gave."""
    answer, whole = over_http(cluster, **fields), over_grpc(cluster, **fields)
    assert whole.texts == [choice["text"] for choice in answer["choices"]]
    assert whole.tokens == [choice["token_ids"] for choice in answer["choices"]]
    assert whole.finishes == [choice["finish_reason"] for choice in answer["choices"]]
    assert list(whole.first.prompt_token_ids) == answer["choices"][0]["prompt_token_ids"]
    usage = answer["usage"]
    assert whole.usage.prompt_tokens == usage["prompt_tokens"]
    assert whole.usage.completion_tokens == usage["completion_tokens"]
    return whole


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"n": 2},
        {"n": 2, "best_of": 3},
        {"seed": 12},
        {"top_k": 3},
        {"top_p": 0.5},
        {"min_p": 0.3},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0},
        {"repetition_penalty": 1.5},
        {"bad_words": ["list", "the"]},
        {"cache_salt": "of its own"},
        {"echo": True},
    ],
    ids=lambda fields: ",".join(fields),
)
def test_the_same_answer(cluster: Cluster, fields: dict[str, Any]) -> None:
    same(cluster, **{**NOISY, "ignore_eos": True, **fields})


def test_stop_strings(cluster: Cluster, piece: str) -> None:
    stop = {"stop": ["never to be seen", piece], **GREEDY}
    whole = same(cluster, **stop)
    assert whole.finishes == ["stop"]
    assert same(cluster, **stop, include_stop_str_in_output=True).texts == [whole.texts[0] + piece]


def test_tokens_that_end_an_answer_and_tokens_that_may_be_chosen(cluster: Cluster, word: int) -> None:
    forced = {"temperature": 0, "logit_bias": {str(word): 100}}
    assert same(cluster, **forced, stop_token_ids=[word], ignore_eos=True).finishes == ["stop"]
    assert len(same(cluster, **forced, stop_token_ids=[word], ignore_eos=True, min_tokens=5).tokens[0]) == 6
    assert same(cluster, **GREEDY, allowed_token_ids=[word]).tokens == [[word] * 12]
    eos = model_config()["eos_token_id"]
    assert same(cluster, temperature=0, logit_bias={str(eos): 100}).finishes == ["stop"]


def test_logprobs_of_every_choice(cluster: Cluster) -> None:
    fields = {**NOISY, "ignore_eos": True, "n": 2, "logprobs": 3}
    answer, whole = over_http(cluster, **fields), same(cluster, **fields)
    for choice, logprobs in zip(answer["choices"], whole.logprobs, strict=True):
        assert [each.token for each in logprobs] == choice["token_ids"]
        assert [each.logprob for each in logprobs] == pytest.approx(choice["logprobs"]["token_logprobs"], abs=CLOSE)
        for each, top in zip(logprobs, choice["logprobs"]["top_logprobs"], strict=True):
            assert len(each.top) == 3
            assert max(one.logprob for one in each.top) == pytest.approx(max(top.values()), abs=CLOSE)


def test_logprobs_of_the_prompt(cluster: Cluster) -> None:
    answer = over_http(cluster, **GREEDY, prompt_logprobs=2)
    shown, whole = answer["choices"][0]["prompt_logprobs"], same(cluster, **GREEDY, prompt_logprobs=2)
    known = whole.first.prompt_logprobs
    assert shown[0] is None
    assert len(known) == len(shown) - 1 > 1
    for each, over_http_each in zip(known, shown[1:], strict=True):
        assert each.logprob == pytest.approx(over_http_each[str(each.token)]["logprob"], abs=CLOSE)
        assert {str(top.token) for top in each.top} <= set(over_http_each)


def test_a_chat(cluster: Cluster) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a list?"}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 12, "temperature": 0, "return_token_ids": True}
    answer = cluster.post("/v1/chat/completions", body)[1]
    chat = i.ChatMessages(messages=[i.ChatMessage(**message) for message in messages])
    sampling = i.GenerateSampling(max_tokens=12, temperature=0)
    request = i.GenerateRequest(model=MODEL, chat=chat, sampling=sampling, return_prompt_token_ids=True)
    whole = Whole(responses(cluster.context["grpc"], request))
    assert whole.texts == [answer["choices"][0]["message"]["content"]]
    assert list(whole.first.prompt_token_ids) == answer["prompt_token_ids"]


@pytest.fixture
def stub(cluster: Cluster) -> Iterator[i_grpc.InferenceStub]:
    with grpc.insecure_channel(cluster.context["grpc"]) as channel:
        grpc.channel_ready_future(channel).result(timeout=60)  # a call's deadline does not count connecting
        yield i_grpc.InferenceStub(channel)


def ended(cluster: Cluster, *outcomes: str) -> float:
    """Calls that ended in one of these ways."""
    return sum(cluster.metric("tandem_requests_total", api="grpc", outcome=outcome) for outcome in outcomes)


def test_a_cancelled_call_leaves_nothing(cluster: Cluster, stub: i_grpc.InferenceStub) -> None:
    wait_for(lambda: is_free(cluster), 60, "nothing is left of other requests")
    before = ended(cluster, "cancelled")
    call: Any = stub.Generate(completion(MODEL, PROMPT, **ENDLESS), timeout=120)
    assert next(call).choices
    assert not is_free(cluster)
    call.cancel()
    wait_for(lambda: ended(cluster, "cancelled") == before + 1, 60, "it counts as cancelled")
    wait_for(lambda: is_free(cluster), 60, "a cancelled call's blocks are free on both workers")


def test_a_deadline_ends_a_call_and_frees_what_it_held(cluster: Cluster, stub: i_grpc.InferenceStub) -> None:
    either = ("deadline_exceeded", "cancelled")  # whichever of the call's ends is first to notice
    before = ended(cluster, *either)
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(completion(MODEL, PROMPT, **ENDLESS), timeout=2.0))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    wait_for(lambda: ended(cluster, *either) == before + 1, 60, "it counts as too late")
    wait_for(lambda: is_free(cluster), 60, "blocks of a call whose deadline passed are free on both workers")
