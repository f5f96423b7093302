"""Log-probabilities of prompts from whichever worker computes them: whole, in order, ahead of the first token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.core.sampling import SamplingParams
from tandem.engine.sim.arithmetic import expected_prompt_logprobs, expected_tokens
from tandem.rpc.v1 import generation_pb2 as g
from tests.integration.worker.loopback import Loopback
from tests.integration.worker.pair import MODEL
from tests.integration.worker.test_loopback import prompt_of

PROMPT = prompt_of(300)
COUNT = 3


@pytest.fixture
def loopback(folder: Path) -> Iterator[Loopback]:
    pair = Loopback(folder, MODEL, engine="sim", transport="shm", chunk_tokens=64)
    yield pair
    pair.close()


def check(loopback: Loopback, request: str, prompt: list[int] = PROMPT) -> None:
    params = SamplingParams(max_tokens=1, prompt_logprobs=COUNT)
    wanted = expected_prompt_logprobs(prompt, 4096, params)
    got: list[Any] = []
    for part in loopback.prompts[request]:
        assert part.position == 1 + len(got)
        got += part.logprobs
    assert [each.token for each in got] == prompt[1:]
    assert [each.rank for each in got] == [each.rank for each in wanted]
    assert [each.logprob for each in got] == pytest.approx([each.logprob for each in wanted])
    for each, other in zip(got, wanted, strict=True):
        assert [top.token for top in each.top] == [token for token, _ in other.top]
        assert [top.logprob for top in each.top] == pytest.approx([value for _, value in other.top])


def test_over_a_hand_over_cold_and_warm(loopback: Loopback) -> None:
    for name in ("cold", "warm"):
        loopback.submit(name, PROMPT, max_tokens=20, prompt_logprobs=COUNT)
        loopback.run_until_rest()
        check(loopback, name)
        assert loopback.tokens(name) == expected_tokens(PROMPT, 20, 4096, eos_token_ids=(1,))
        assert loopback.chunks[name][0][0].cached_tokens == 0
    loopback.submit("plain", PROMPT, max_tokens=2)
    loopback.run_until_rest()
    assert loopback.prompts["plain"] == []
    assert loopback.chunks["plain"][0][0].cached_tokens == 288


def test_on_one_worker(loopback: Loopback) -> None:
    loopback.submit("before", PROMPT, max_tokens=4)
    loopback.run_until_rest()
    loopback.submit("r", PROMPT, is_whole=True, prompt_logprobs=COUNT, n=2)
    loopback.run_until_rest()
    check(loopback, "r")


def test_one_token(loopback: Loopback) -> None:
    loopback.submit("r", PROMPT, max_tokens=1, prompt_logprobs=COUNT)
    loopback.run_until_rest()
    check(loopback, "r")


def test_in_a_replay(loopback: Loopback) -> None:
    answer = expected_tokens(PROMPT, 20, 4096, eos_token_ids=(1,))
    forced = [g.ChoiceState(choice=0, tokens=answer[:6])]
    loopback.submit("r", PROMPT, attempt=2, forced=forced, max_tokens=20, prompt_logprobs=COUNT)
    loopback.run_until_rest()
    check(loopback, "r")
    assert loopback.tokens("r") == answer[6:]
