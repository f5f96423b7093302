"""Budgets of thoughts in a worker: which token is forced where, and the same at every place where an answer goes on."""

import dataclasses
import random

import pytest
import torch

from tandem.core.errors import InvalidRequestError
from tandem.core.sampling import SamplingParams
from tandem.core.thought_budget import ThoughtBudget
from tandem.engine.runner_protocol import SampleRow
from tandem.engine.sampler import sample
from tandem.engine.sampling_state import ChoiceSampling
from tandem.engine.sim.arithmetic import expected_tokens
from tandem.engine.thought_counter import ThoughtCounter

VOCAB = 40
BEGIN, END, CALL = 30, 31, 32
CLOSING = (20, END, 21)
BUDGET = ThoughtBudget(tokens=3, begin=(BEGIN,), ends=(END, CALL), closing=CLOSING)
BEGUN = dataclasses.replace(BUDGET, is_begun=True)
CHANNELS = ThoughtBudget(
    tokens=3, begin=(BEGIN, 5), ends=(END,), closing=(END, 22), last_closing=(END, 22, 23), is_begun=False
)


def written(budget: ThoughtBudget, model: list[int]) -> list[int]:
    """The output of a model that would write these tokens, each when it may choose."""
    counter, tokens, wanted = ThoughtCounter(budget), [], list(model)
    while wanted or counter.forced is not None:
        forced = counter.forced
        tokens.append(wanted.pop(0) if forced is None else forced)
        if not counter.is_over:
            counter.add(tokens[-1])
    return tokens


@pytest.mark.parametrize(
    ("budget", "model", "output"),
    [
        pytest.param(BEGUN, [7, 8, 9, 10], [7, 8, 9, *CLOSING, 10], id="the prompt begins it"),
        pytest.param(BUDGET, [BEGIN, 7, 8, 9, 10], [BEGIN, 7, 8, 9, *CLOSING, 10], id="the answer begins it"),
        pytest.param(BUDGET, [7, 8, 9, 10, 11], [7, 8, 9, 10, 11], id="no thought"),
        pytest.param(BEGUN, [7, END, 8, 9, 10, 11], [7, END, 8, 9, 10, 11], id="ended by the model"),
        pytest.param(BEGUN, [7, CALL, 8, 9, 10, 11], [7, CALL, 8, 9, 10, 11], id="ended by a call"),
        pytest.param(BEGUN, [7, END, BEGIN, 9, 9, 9, 9], [7, END, BEGIN, 9, 9, 9, 9], id="one thought an answer"),
        pytest.param(dataclasses.replace(BEGUN, tokens=0), [7, 8], [*CLOSING, 7, 8], id="none"),
        pytest.param(CHANNELS, [5, BEGIN, 7, 8, 9, 10, 11], [5, BEGIN, 7, 8, 9, 10, 11], id="another channel"),
        pytest.param(CHANNELS, [BEGIN, 5, 7, 8, 9, 10, 11], [BEGIN, 5, 7, 8, 9, END, 22, 10, 11], id="a channel"),
        pytest.param(
            CHANNELS,
            [BEGIN, 5, 7, END, BEGIN, 5, 8, 9, 10],
            [BEGIN, 5, 7, END, BEGIN, 5, 8, 9, END, 22, 10],
            id="thoughts share it",
        ),
        pytest.param(
            CHANNELS,
            [BEGIN, 5, 7, 8, 9, BEGIN, 5, 10],
            [BEGIN, 5, 7, 8, 9, END, 22, BEGIN, 5, END, 22, 23, 10],
            id="a thought with nothing left",
        ),
    ],
)
def test_the_end_is_forced_where_the_budget_is_spent(
    budget: ThoughtBudget, model: list[int], output: list[int]
) -> None:
    assert written(budget, model) == output


@pytest.mark.parametrize("budget", [BUDGET, BEGUN, CHANNELS], ids=["think", "begun", "channels"])
def test_replay_forces_the_same_at_every_cut(budget: ThoughtBudget) -> None:
    rng, count = random.Random(3), 0
    for _ in range(50):
        tokens = written(budget, [rng.choice([5, 7, BEGIN, END]) for _ in range(20)])
        forced = []
        for cut in range(len(tokens)):
            state = ChoiceSampling(SamplingParams(max_tokens=99, thoughts=budget), 0, (1,), tokens[:cut])
            forced.append(state.forced)
        count += sum(token is not None for token in forced)
        assert all(token is None or token == tokens[place] for place, token in enumerate(forced))
        counter = ThoughtCounter(budget)
        for token, wanted in zip(tokens, forced, strict=True):
            if not counter.is_over:
                assert counter.forced == wanted
                counter.add(token)
    assert count > 50


def row(outputs: list[int], **options: object) -> SampleRow:
    params = SamplingParams(max_tokens=99, thoughts=BEGUN, **options)  # type: ignore[arg-type]
    return SampleRow(0, len(outputs), ChoiceSampling(params, 0, (1,), outputs, (2,)))


@pytest.mark.parametrize("options", [
    {"temperature": 0.0}, {"temperature": 1.3, "seed": 4}, {"top_k": 2}, {"bad_words": ((20,),)},
    {"logit_bias": ((20, -100.0),)}, {"allowed_token_ids": (7, 8)}, {"min_tokens": 50, "stop_token_ids": (20,)},
])  # fmt: skip
def test_it_comes_before_all_other_settings(options: dict[str, object]) -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
    logits[0, 20] = -50.0
    chosen: list[int] = []
    for _ in range(len(CLOSING)):
        (token,) = sample(logits, [row([7, 8, 7, *chosen], logprobs=1, **options)])
        assert token.is_valid
        assert token.logprob is not None
        assert token.logprob.logprob == pytest.approx(logits.log_softmax(-1)[0, token.token].item())
        chosen.append(token.token)
    assert tuple(chosen) == CLOSING


def test_rows_beside_it_keep_their_tokens() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(2))
    others = [
        SampleRow(0, 3, ChoiceSampling(SamplingParams(max_tokens=9, **options), 0, (1,), [7, 8, 9]))
        for options in ({"temperature": 0.0}, {"seed": 7}, {"frequency_penalty": 1.0, "temperature": 0.0})
    ]
    alone = [sample(logits, [one])[0].token for one in others]
    together = sample(logits, [others[0], row([7, 8, 9]), *others[1:]])
    assert [token.token for token in together] == [alone[0], CLOSING[0], *alone[1:]]


def test_behind_the_thoughts_a_choice_is_as_one_without_a_budget() -> None:
    state = row([7, 8, 9], temperature=0.0).sampling
    assert (state.changes_scores, state.is_plain) == (True, False)
    for token in CLOSING:
        state.count(token)
    assert (state.changes_scores, state.is_plain, state.thoughts) == (False, True, None)


def test_the_simulation_forces_it_too() -> None:
    params = SamplingParams(max_tokens=9, temperature=0.0, thoughts=BEGUN)
    free, bound = (expected_tokens((3, 4), 9, VOCAB, sampling=one) for one in (None, params))
    assert bound[:6] == [*free[:3], *CLOSING]


def test_tokens_beyond_the_vocabulary_are_refused() -> None:
    params = SamplingParams(max_tokens=9, thoughts=dataclasses.replace(BUDGET, closing=(VOCAB,)))
    with pytest.raises(InvalidRequestError, match="thoughts is 40: it must be below the vocabulary size 40"):
        params.validate(VOCAB)
    long = SamplingParams(max_tokens=9, thoughts=dataclasses.replace(BUDGET, ends=(1,) * 65))
    with pytest.raises(InvalidRequestError, match="thoughts is 65 tokens"):
        long.validate(VOCAB)
