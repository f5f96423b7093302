"""A choice that nobody wants more of, in every phase of a hand-over: the others are the oracle's, nothing is held."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.core.sampling import SamplingParams
from tandem.engine.sim.arithmetic import expected_tokens
from tandem.rpc.v1 import generation_pb2 as g
from tandem.rpc.v1 import worker_pb2 as w
from tests.integration.worker.loopback import Loopback
from tests.integration.worker.pair import MODEL
from tests.integration.worker.test_loopback import prompt_of

SETTINGS: dict[str, Any] = {"n": 3, "temperature": 1.0, "seed": 11, "max_tokens": 30}
PROMPT = prompt_of(300)


def oracle(choice: int, prompt: list[int] = PROMPT) -> list[int]:
    params = SamplingParams(**SETTINGS)
    return expected_tokens(prompt, 30, 4096, eos_token_ids=(1,), sampling=params, choice=choice)


@pytest.fixture
def loopback(folder: Path) -> Iterator[Loopback]:
    pair = Loopback(folder, MODEL, engine="sim", transport="shm", chunk_tokens=64)
    yield pair
    pair.close()


def end(loopback: Loopback, request: str, *choices: int, attempt: int = 1) -> None:
    for rank in (loopback.p, loopback.d):
        rank.from_router(end_choices=w.EndChoices(request=request, attempt=attempt, choices=choices))


def check_rest(loopback: Loopback) -> None:
    loopback.run_until_rest()
    loopback.p.check_baseline()
    loopback.d.check_baseline()


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 4, 5, 6, 7, 9, 12])
@pytest.mark.parametrize("choice", [0, 2])
def test_at_any_turn(loopback: Loopback, turns: int, choice: int) -> None:
    loopback.submit("r", PROMPT, **SETTINGS)
    for _ in range(turns):
        loopback.turn()
    end(loopback, "r", choice)
    check_rest(loopback)
    for other in {0, 1, 2} - {choice}:
        assert loopback.tokens("r", other) == oracle(other)
    said = loopback.tokens("r", choice)
    assert said == oracle(choice)[: len(said)]
    assert len(said) <= turns + 1
    assert not loopback.failed["r"]


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 4, 6, 9])
def test_all_at_any_turn(loopback: Loopback, turns: int) -> None:
    loopback.submit("r", PROMPT, **SETTINGS)
    for _ in range(turns):
        loopback.turn()
    end(loopback, "r", 0, 1, 2)
    check_rest(loopback)
    said = [loopback.tokens("r", choice) for choice in range(3)]
    assert all(tokens == oracle(choice)[: len(tokens)] for choice, tokens in enumerate(said))
    assert max(map(len, said)) <= turns + 1


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 7])
def test_in_a_replay(loopback: Loopback, turns: int) -> None:
    forced = [g.ChoiceState(choice=choice, tokens=oracle(choice)[: 4 + 9 * choice]) for choice in range(3)]
    loopback.submit("r", PROMPT, attempt=2, forced=forced, **SETTINGS)
    for _ in range(turns):
        loopback.turn()
    end(loopback, "r", 0, attempt=2)
    check_rest(loopback)
    assert loopback.tokens("r", 1) == oracle(1)[13:]
    assert loopback.tokens("r", 2) == oracle(2)[22:]


def test_that_ended_before_the_replay(loopback: Loopback) -> None:
    stopped = g.ChoiceState(choice=0, tokens=oracle(0)[:4], finish=g.FINISH_REASON_STOP)
    forced = [stopped, g.ChoiceState(choice=2, tokens=oracle(2)[:4])]
    loopback.submit("r", PROMPT, attempt=2, forced=forced, **SETTINGS)
    check_rest(loopback)
    assert loopback.tokens("r", 0) == []
    assert loopback.tokens("r", 1) == oracle(1)
    assert loopback.tokens("r", 2) == oracle(2)[4:]


@pytest.mark.parametrize("turns", [0, 1, 3])
def test_on_one_worker(loopback: Loopback, turns: int) -> None:
    loopback.submit("r", PROMPT, is_whole=True, **SETTINGS)
    for _ in range(turns):
        loopback.turn()
    end(loopback, "r", 1)
    check_rest(loopback)
    assert [loopback.tokens("r", choice) for choice in (0, 2)] == [oracle(0), oracle(2)]


def test_of_nobody_is_ignored(loopback: Loopback) -> None:
    end(loopback, "who", 0)
    loopback.submit("r", PROMPT, **SETTINGS)
    end(loopback, "r", 7, attempt=1)
    end(loopback, "r", 0, attempt=2)
    check_rest(loopback)
    assert [loopback.tokens("r", choice) for choice in range(3)] == [oracle(choice) for choice in range(3)]
