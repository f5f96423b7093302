"""Log-probabilities of prompts from whichever worker computes them: whole, in order, ahead of the first token."""

from typing import Any

import pytest

from tandem.core.sampling import SamplingParams
from tandem.engine.sim.arithmetic import expected_tokens
from tandem.rpc.v1 import generation_pb2 as g
from tests.integration.worker.loopback import Loopback, prompt_of
from tests.unit.engine.simulation import expected_prompt_logprobs

PROMPT = prompt_of(300)
COUNT = 3


def check(sim_loopback: Loopback, request: str, prompt: list[int] = PROMPT) -> None:
    params = SamplingParams(max_tokens=1, prompt_logprobs=COUNT)
    wanted = expected_prompt_logprobs(prompt, 4096, params)
    got: list[Any] = []
    for part in sim_loopback.prompts[request]:
        assert part.position == 1 + len(got)
        got += part.logprobs
    assert [each.token for each in got] == prompt[1:]
    assert [each.rank for each in got] == [each.rank for each in wanted]
    assert [each.logprob for each in got] == pytest.approx([each.logprob for each in wanted])
    for each, other in zip(got, wanted, strict=True):
        assert [top.token for top in each.top] == [token for token, _ in other.top]
        assert [top.logprob for top in each.top] == pytest.approx([value for _, value in other.top])


def test_over_a_hand_over_cold_and_warm(sim_loopback: Loopback) -> None:
    for name in ("cold", "warm"):
        sim_loopback.submit(name, PROMPT, max_tokens=20, prompt_logprobs=COUNT)
        sim_loopback.run_until_rest()
        check(sim_loopback, name)
        assert sim_loopback.tokens(name) == expected_tokens(PROMPT, 20, 4096, eos_token_ids=(1,))
        assert sim_loopback.chunks[name][0][0].cached_tokens == 0
    sim_loopback.submit("plain", PROMPT, max_tokens=2)
    sim_loopback.run_until_rest()
    assert sim_loopback.prompts["plain"] == []
    assert sim_loopback.chunks["plain"][0][0].cached_tokens == 288


def test_on_one_worker(sim_loopback: Loopback) -> None:
    sim_loopback.submit("before", PROMPT, max_tokens=4)
    sim_loopback.run_until_rest()
    sim_loopback.submit("r", PROMPT, is_whole=True, prompt_logprobs=COUNT, n=2)
    sim_loopback.run_until_rest()
    check(sim_loopback, "r")


def test_one_token(sim_loopback: Loopback) -> None:
    sim_loopback.submit("r", PROMPT, max_tokens=1, prompt_logprobs=COUNT)
    sim_loopback.run_until_rest()
    check(sim_loopback, "r")


def test_in_a_replay(sim_loopback: Loopback) -> None:
    answer = expected_tokens(PROMPT, 20, 4096, eos_token_ids=(1,))
    forced = [g.ChoiceState(choice=0, tokens=answer[:6])]
    sim_loopback.submit("r", PROMPT, attempt=2, forced=forced, max_tokens=20, prompt_logprobs=COUNT)
    sim_loopback.run_until_rest()
    check(sim_loopback, "r")
    assert sim_loopback.tokens("r") == answer[6:]
