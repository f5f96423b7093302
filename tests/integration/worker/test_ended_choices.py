"""A cancelled choice, in every phase of a hand-over: the others are the oracle's, nothing is held."""

from typing import Any

import pytest

from tandem.core.sampling import SamplingParams
from tandem.engine.sim.arithmetic import expected_tokens
from tandem.rpc.v1 import generation_pb2 as g
from tandem.rpc.v1 import worker_pb2 as w
from tests.integration.worker.loopback import Loopback, prompt_of

SETTINGS: dict[str, Any] = {"n": 3, "temperature": 1.0, "seed": 11, "max_tokens": 30}
PROMPT = prompt_of(300)


def oracle(choice: int, prompt: list[int] = PROMPT) -> list[int]:
    params = SamplingParams(**SETTINGS)
    return expected_tokens(prompt, 30, 4096, eos_token_ids=(1,), sampling=params, choice=choice)


def end(sim_loopback: Loopback, request: str, *choices: int, attempt: int = 1) -> None:
    for rank in (sim_loopback.p, sim_loopback.d):
        rank.from_router(end_choices=w.EndChoices(request=request, attempt=attempt, choices=choices))


@pytest.mark.drawn(7)
@pytest.mark.parametrize("turns", [0, 1, 2, 3, 4, 5, 6, 7, 9, 12])
@pytest.mark.parametrize("choice", [0, 2])
def test_at_any_turn(sim_loopback: Loopback, turns: int, choice: int) -> None:
    sim_loopback.submit("r", PROMPT, **SETTINGS)
    for _ in range(turns):
        sim_loopback.turn()
    end(sim_loopback, "r", choice)
    sim_loopback.rest_at_baseline()
    for other in {0, 1, 2} - {choice}:
        assert sim_loopback.tokens("r", other) == oracle(other)
    said = sim_loopback.tokens("r", choice)
    assert said == oracle(choice)[: len(said)]
    assert len(said) <= turns + 1
    assert not sim_loopback.failed["r"]


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 4, 6, 9])
def test_all_at_any_turn(sim_loopback: Loopback, turns: int) -> None:
    sim_loopback.submit("r", PROMPT, **SETTINGS)
    for _ in range(turns):
        sim_loopback.turn()
    end(sim_loopback, "r", 0, 1, 2)
    sim_loopback.rest_at_baseline()
    said = [sim_loopback.tokens("r", choice) for choice in range(3)]
    assert all(tokens == oracle(choice)[: len(tokens)] for choice, tokens in enumerate(said))
    assert max(map(len, said)) <= turns + 1


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 7])
def test_in_a_replay(sim_loopback: Loopback, turns: int) -> None:
    forced = [g.ChoiceState(choice=choice, tokens=oracle(choice)[: 4 + 9 * choice]) for choice in range(3)]
    sim_loopback.submit("r", PROMPT, attempt=2, forced=forced, **SETTINGS)
    for _ in range(turns):
        sim_loopback.turn()
    end(sim_loopback, "r", 0, attempt=2)
    sim_loopback.rest_at_baseline()
    assert sim_loopback.tokens("r", 1) == oracle(1)[13:]
    assert sim_loopback.tokens("r", 2) == oracle(2)[22:]


def test_that_ended_before_the_replay(sim_loopback: Loopback) -> None:
    stopped = g.ChoiceState(choice=0, tokens=oracle(0)[:4], finish=g.FINISH_REASON_STOP)
    forced = [stopped, g.ChoiceState(choice=2, tokens=oracle(2)[:4])]
    sim_loopback.submit("r", PROMPT, attempt=2, forced=forced, **SETTINGS)
    sim_loopback.rest_at_baseline()
    assert sim_loopback.tokens("r", 0) == []
    assert sim_loopback.tokens("r", 1) == oracle(1)
    assert sim_loopback.tokens("r", 2) == oracle(2)[4:]


@pytest.mark.parametrize("turns", [0, 1, 3])
def test_on_one_worker(sim_loopback: Loopback, turns: int) -> None:
    sim_loopback.submit("r", PROMPT, is_whole=True, **SETTINGS)
    for _ in range(turns):
        sim_loopback.turn()
    end(sim_loopback, "r", 1)
    sim_loopback.rest_at_baseline()
    assert [sim_loopback.tokens("r", choice) for choice in (0, 2)] == [oracle(0), oracle(2)]


def test_of_nobody_is_ignored(sim_loopback: Loopback) -> None:
    end(sim_loopback, "who", 0)
    sim_loopback.submit("r", PROMPT, **SETTINGS)
    end(sim_loopback, "r", 7, attempt=1)
    end(sim_loopback, "r", 0, attempt=2)
    sim_loopback.rest_at_baseline()
    assert [sim_loopback.tokens("r", choice) for choice in range(3)] == [oracle(choice) for choice in range(3)]
