"""Forbidden tokens stay forbidden over hand-overs and replays: every cut of an answer goes on as the oracle does."""

from typing import Any

import pytest

from tandem.core.sampling import SamplingParams
from tandem.engine.sim.arithmetic import expected_tokens
from tandem.rpc.v1 import generation_pb2 as g
from tests.integration.worker.loopback import Loopback, prompt_of

PROMPT = prompt_of(70)
COUNT = 24
PLAIN: dict[str, Any] = {"max_tokens": COUNT, "temperature": 1.0, "seed": 5, "n": 2}
ALLOWED = tuple(range(100, 112))
WORDS = ((101,), (102, 103), (104, 104, 105), *((106, token) for token in range(107, 112)))


def oracle(choice: int, **more: Any) -> list[int]:
    params = SamplingParams(**{**PLAIN, **more})
    return expected_tokens(PROMPT, COUNT, 4096, eos_token_ids=(1,), sampling=params, choice=choice)


def submit(sim_loopback: Loopback, request: str, forced: list[list[int]] | None = None, **more: Any) -> None:
    words = [g.BadWord(tokens=word) for word in more.pop("bad_words", ())]
    states = [g.ChoiceState(choice=choice, tokens=tokens) for choice, tokens in enumerate(forced or [])]
    sim_loopback.submit(request, PROMPT, attempt=2, forced=states, **PLAIN, bad_words=words, **more)
    sim_loopback.run_until_rest()


def test_bad_words_among_few_allowed_tokens(sim_loopback: Loopback) -> None:
    more: dict[str, Any] = {"allowed_token_ids": ALLOWED, "bad_words": WORDS}
    whole = [oracle(choice, **more) for choice in range(2)]
    free = [oracle(choice, allowed_token_ids=ALLOWED) for choice in range(2)]
    assert whole != free, "the words would have come"
    for tokens in whole:
        assert set(tokens) <= set(ALLOWED)
        for word in WORDS:
            assert all(tuple(tokens[at : at + len(word)]) != word for at in range(COUNT))
    submit(sim_loopback, "a", **more)
    assert [sim_loopback.tokens("a", choice) for choice in range(2)] == whole
    for cut in (1, 2, 3, 9, COUNT - 1):
        submit(sim_loopback, f"at {cut}", [tokens[:cut] for tokens in whole], **more)
        assert [sim_loopback.tokens(f"at {cut}", choice) for choice in range(2)] == [tokens[cut:] for tokens in whole]


@pytest.mark.parametrize("least", [0, 1, 2, 10, 23, 24])
def test_min_tokens(sim_loopback: Loopback, least: int) -> None:
    """All that may be chosen but one token would end the answer."""
    more: dict[str, Any] = {"allowed_token_ids": ALLOWED, "stop_token_ids": ALLOWED[1:], "min_tokens": least}
    whole = [oracle(choice, **more) for choice in range(2)]
    ends = [next((place + 1 for place, t in enumerate(tokens) if t != ALLOWED[0]), COUNT) for tokens in whole]
    assert min(ends) >= min(least + 1, COUNT)
    submit(sim_loopback, "a", **more)
    assert [sim_loopback.tokens("a", choice) for choice in range(2)] == [
        t[:end] for t, end in zip(whole, ends, strict=True)
    ]
    if least > 4:
        submit(sim_loopback, "b", [tokens[:4] for tokens in whole], **more)
        rests = [t[4:end] for t, end in zip(whole, ends, strict=True)]
        assert [sim_loopback.tokens("b", choice) for choice in range(2)] == rests
