"""Test choices that met a stop string, and clients that leave."""

from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from tandem.rpc.v1 import worker_pb2 as w
from tests.integration.router.house import MODEL, Build, RouterHarness
from tests.integration.router.leaving import WAYS, ask
from tests.integration.router.scripted_worker import Script
from tools.waiting import wait_for

TOKENIZER = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
FILLER = TOKENIZER.encode(" list", add_special_tokens=False).ids[0]
STOPPING = TOKENIZER.encode(" one two END three", add_special_tokens=False).ids
COUNT = 120


def first_stops(submit: w.Submit, choice: int) -> list[int]:
    """A stop string in the first choice, and in every choice of a prompt that begins with 7."""
    start = STOPPING if choice == 0 or submit.prompt[0] == 7 else []
    return [*start, *[FILLER] * (submit.sampling.max_tokens - len(start))]


@pytest.fixture(params=["always", "never"])
def house(build: Build, request: pytest.FixtureRequest) -> RouterHarness:
    from tandem.core.config import Disaggregation

    house = build(script=Script(answer=first_stops, step_s=0.005), mode=Disaggregation(request.param))
    house.wait_ready()
    return house


def complete(house: RouterHarness, **body: Any) -> dict[str, Any]:
    common = {"model": "tiny", "max_tokens": COUNT, "stop": "END"}
    answer = httpx.post(f"{house.url}/v1/completions", json={**common, **body}, timeout=30)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_the_others_go_on(house: RouterHarness) -> None:
    answer = complete(house, prompt=[9, 9], n=3)
    texts = [(choice["finish_reason"], choice["text"]) for choice in answer["choices"]]
    assert texts == [("stop", " one two "), ("length", " list" * COUNT), ("length", " list" * COUNT)]
    decode = house.workers["decode-0"]
    assert [(list(ended.choices), ended.attempt) for ended in decode.ended] == [([0], 1)]
    said = {choice: count for (_, choice), count in decode.said.items()}
    assert said[0] < COUNT // 2 < said[1]
    assert answer["usage"]["completion_tokens"] < 2 * COUNT + len(STOPPING)
    house.wait(lambda: not house.router.dispatcher.flights)


def test_a_prompt_whose_choices_all_stopped_ends_at_once(house: RouterHarness) -> None:
    answer = complete(house, prompt=[[7, 9], [9, 9]], n=2)
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop", "stop", "stop", "length"]
    decode = house.workers["decode-0"]
    first = next(submit.request for submit in decode.submitted if submit.prompt[0] == 7)
    assert max(decode.said[first, choice] for choice in (0, 1)) < COUNT // 2
    assert first in [cancel.request for cancel in decode.cancels]


def test_a_worker_that_goes_on_is_not_heard(build: Build) -> None:
    house = build(script=Script(answer=first_stops, step_s=0.001, is_stubborn=True))
    house.wait_ready()
    answer = complete(house, prompt=[9, 9], n=2)
    assert [choice["text"] for choice in answer["choices"]] == [" one two ", " list" * COUNT]
    assert house.metric('tandem_router_dropped_chunks_total{reason="unwanted"}') > 0


@pytest.mark.parametrize("way", WAYS)
def test_a_client_that_leaves_between_attempts(build: Build, way: str) -> None:
    house = build()
    house.wait_ready()
    dispatcher, decode = house.router.dispatcher, house.workers["decode-0"]
    decode.script = Script(stall_at=3)
    http, rpc = (f"127.0.0.1:{house.ports[name]}" for name in ("http", "grpc"))
    leave = ask(http, rpc, way, "Hello", max_tokens=50)
    house.wait(lambda: [flight.output_tokens for flight in dispatcher.flights] == [3])
    house.kill_worker("decode-0")
    house.wait(lambda: dispatcher.waiting == 1)
    leave()
    house.wait(lambda: not dispatcher.flights)
    assert not dispatcher.waiting
    decode.script = Script()
    house.restart_worker("decode-0")
    house.wait_ready()
    assert len(decode.submitted) == 1
    assert all(not link.requests and not len(link.outstanding) for link in house.router.table.links)
    api = "grpc" if way == "grpc" else "completions"
    wait_for(lambda: house.metric(f'tandem_requests_total{{api="{api}",outcome="cancelled"}}') == 1)
