"""Test the sampler, on the host and on a device."""

import math
import random
from functools import partial
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tandem.core.sampling import SamplingParams
from tandem.engine import sampler, token_drawing
from tandem.engine.logits_processors import apply_bias, apply_penalties
from tandem.engine.request import TokenOutput
from tandem.engine.runner_protocol import SampleRow
from tandem.engine.sampler import sample, uniform
from tandem.engine.sampling_state import ChoiceSampling
from tandem.engine.token_drawing import choose_filtered, kept_probabilities, likeliest
from tandem.kernels.sample import choose_token

VOCAB = 400


def random_logits(rows: int = 1, vocab: int = VOCAB, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def params(**options: object) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 10, "temperature": 1.0} | options))  # type: ignore[arg-type]


def row(index: int = 0, at: int = 0, choice: int = 0, prompt: tuple[int, ...] = (1, 2), **options: object) -> SampleRow:
    outputs = options.pop("outputs", ())
    return SampleRow(at, index, ChoiceSampling(params(**options), choice, prompt, outputs))  # type: ignore[arg-type]


def one(logits: torch.Tensor, **options: object) -> TokenOutput:
    (result,) = sample(logits, [row(**options)])  # type: ignore[arg-type]
    return result


def transformers_probabilities(logits: torch.Tensor, p: SamplingParams) -> torch.Tensor:
    """Temperature, top-k, top-p, min-p in transformers' order."""
    chain: list[LogitsProcessor] = [TemperatureLogitsWarper(p.temperature)]
    if p.top_k:
        chain.append(TopKLogitsWarper(p.top_k))
    if p.top_p < 1.0:
        chain.append(TopPLogitsWarper(p.top_p))
    if p.min_p > 0.0:
        chain.append(MinPLogitsWarper(p.min_p))
    return LogitsProcessorList(chain)(torch.LongTensor([[0]]), logits).softmax(-1)


FILTERS = [
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 10_000},
    {"top_p": 0.1},
    {"top_p": 0.9},
    {"top_p": 0.9999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 50, "top_p": 0.8},
    {"top_k": 50, "min_p": 0.1},
    {"top_p": 0.95, "min_p": 0.02},
    {"top_k": 100, "top_p": 0.7, "min_p": 0.3},
]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_filters_keep_what_transformers_keeps(options: dict[str, float], temperature: float) -> None:
    p = params(temperature=temperature, **options)
    for seed in range(5):
        logits = random_logits(seed=seed)
        wanted = transformers_probabilities(logits.clone(), p)[0].double()
        ids, kept, _ = kept_probabilities(
            logits / temperature,
            torch.tensor([min(p.top_k, VOCAB)]),
            torch.tensor([p.top_p], dtype=torch.float64),
            torch.tensor([p.min_p], dtype=torch.float64),
            VOCAB,
        )
        got = torch.zeros(VOCAB, dtype=torch.float64).scatter(0, ids[0], kept[0].double() / kept[0].double().sum())
        assert ((got > 0) == (wanted > 0)).all()
        torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("options", FILTERS, ids=str)
@pytest.mark.parametrize("scale", [0.01, 1.0, 10.0])
def test_a_short_candidate_list_changes_nothing(
    options: dict[str, float], scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = random_logits(8, 2000, scale=scale)
    logits[3] = 0.0  # every token is equally likely
    logits[4] = logits[4].round()  # many ties
    p = params(**options)
    args = (
        torch.tensor([min(p.top_k, 2000)] * 8),
        torch.tensor([p.top_p] * 8, dtype=torch.float64),
        torch.tensor([p.min_p] * 8, dtype=torch.float64),
    )
    for draw in range(20):
        uniforms = torch.tensor([uniform(draw, 0, i) for i in range(8)], dtype=torch.float64)
        monkeypatch.setattr(token_drawing, "CANDIDATES", 2000)
        full = choose_filtered(logits, *args, uniforms)
        monkeypatch.setattr(token_drawing, "CANDIDATES", 16)
        assert choose_filtered(logits, *args, uniforms).tolist() == full.tolist()


@pytest.mark.parametrize("penalty", [0.5, 1.3, 2.0])
def test_repetition_penalty_is_transformers(penalty: float) -> None:
    prompt, outputs = (3, 5, 5, 9), (9, 11, 3, 40, 11)
    logits = random_logits()
    ids = torch.tensor([[*prompt, *outputs]])
    wanted = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits.clone())
    state = ChoiceSampling(params(repetition_penalty=penalty), 0, prompt, outputs)
    apply_penalties(logits, [state])
    torch.testing.assert_close(logits, wanted)


def test_presence_and_frequency_follow_openai() -> None:
    outputs = (4, 4, 4, 7, 9)
    logits = random_logits()
    wanted = logits.clone()
    for token in range(VOCAB):
        count = outputs.count(token)
        wanted[0, token] -= 0.7 * (count > 0) + -0.4 * count
    state = ChoiceSampling(params(presence_penalty=0.7, frequency_penalty=-0.4), 0, (4, 8), outputs)
    apply_penalties(logits, [state])
    torch.testing.assert_close(logits, wanted)


def test_penalties_and_bias_touch_only_their_own_rows() -> None:
    logits = random_logits(4)
    before = logits.clone()
    states = [
        ChoiceSampling(params(), 0, (1,), (2,)),
        ChoiceSampling(params(repetition_penalty=1.5), 0, (1, 2), (3,)),
        ChoiceSampling(params(frequency_penalty=0.5), 0, (1, 2), (3, 3)),
        ChoiceSampling(params(logit_bias=((8, 5.0), (9, -100.0))), 0, (1, 2), (3, 3)),
    ]
    apply_penalties(logits, states)
    apply_bias(logits, states)
    changed = [set((logits[i] != before[i]).nonzero()[:, 0].tolist()) for i in range(4)]
    assert changed == [set(), {1, 2, 3}, {3}, {8, 9}]


def test_greedy_is_argmax_and_leaves_the_logits_alone() -> None:
    logits = random_logits(5)
    before = logits.clone()
    rows = [row(at=i, temperature=0.0, frequency_penalty=0.1 * (i % 2)) for i in range(5)]
    assert [r.token for r in sample(logits, rows)] == logits.argmax(-1).tolist()
    assert torch.equal(logits, before)


def test_greedy_with_bias_and_penalties() -> None:
    logits = torch.zeros(1, 10)
    logits[0, 4], logits[0, 6] = 5.0, 4.8
    assert one(logits, temperature=0.0).token == 4
    assert one(logits, temperature=0.0, logit_bias=((6, 0.5),)).token == 6
    assert one(logits, temperature=0.0, presence_penalty=0.5, outputs=(4,)).token == 6
    assert one(logits, temperature=0.0, repetition_penalty=1.2, prompt=(4,)).token == 6
    assert one(logits, temperature=1.0, logit_bias=((2, 100.0),)).token == 2


def test_the_random_number_is_a_function_of_seed_choice_and_index() -> None:
    # The last value is fixed for all time: a replay on a worker of another version must continue the same text.
    values = {uniform(s, c, i) for s in (-(2**63), -1, 0, 1, 2**63 - 1) for c in range(4) for i in range(50)}
    assert len(values) == 5 * 4 * 50
    assert all(0.0 <= value < 1.0 for value in values)
    assert abs(sum(values) / len(values) - 0.5) < 0.03
    assert uniform(7, 1, 3) == 0.2118027796838866


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.2}, {"top_k": 8, "top_p": 0.9, "min_p": 0.05}],
    ids=str,
)
def test_draws_follow_the_distribution(options: dict[str, float]) -> None:
    vocab, draws = 12, 4000
    logits = random_logits(1, vocab, seed=2, scale=1.5)
    p = params(seed=17, **options)
    state = ChoiceSampling(p, 0, (1,))
    counts = [0] * vocab
    for result in sample(logits, [SampleRow(0, i, state) for i in range(draws)]):
        counts[result.token] += 1
    wanted = transformers_probabilities(logits.clone(), p)[0].tolist()
    chi_square = 0.0
    freedom = -1
    for count, probability in zip(counts, wanted, strict=True):
        if probability == 0.0:
            assert count == 0
            continue
        chi_square += (count - draws * probability) ** 2 / (draws * probability)
        freedom += 1
    assert chi_square < freedom + 4 * math.sqrt(2 * max(freedom, 1)) + 4


def test_a_token_does_not_depend_on_the_batch() -> None:
    rng = random.Random(5)
    logits = random_logits(24, 3000)
    rows = []
    for i in range(24):
        options: dict[str, object] = {"temperature": rng.choice([0.0, 0.5, 1.0]), "seed": i}
        options |= rng.choice([{}, {"top_k": 40}, {"top_k": 1500}, {"top_p": 0.9}, {"min_p": 0.01}])
        options |= rng.choice([{}, {"frequency_penalty": 1.0}, {"repetition_penalty": 1.4}, {"logit_bias": ((3, 9),)}])
        options |= rng.choice([{}, {"logprobs": 2}])
        rows.append(row(at=i, index=i % 3, outputs=(3, 4, 4), **options))  # type: ignore[arg-type]
    together = sample(logits, rows)
    for i, request in enumerate(rows):
        alone = sample(logits[i : i + 1], [SampleRow(0, request.index, request.sampling)])[0]
        assert alone == together[i]
    order = list(range(24))
    rng.shuffle(order)
    assert sample(logits, [rows[i] for i in order]) == [together[i] for i in order]


def test_several_choices_draw_from_one_row() -> None:
    logits = random_logits(2)
    rows = [row(at=1, choice=choice, seed=3, temperature=1.5) for choice in range(12)]
    tokens = [result.token for result in sample(logits, rows)]
    assert len(set(tokens)) > 4
    assert tokens[5] == one(logits[1:], choice=5, seed=3, temperature=1.5).token


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = random_logits(2)
    wanted = logits.log_softmax(-1)
    results = sample(
        logits,
        [
            row(at=0, temperature=0.3, top_k=2, logit_bias=((7, 100.0),), logprobs=3),
            row(at=1, temperature=0.0, logprobs=0),
        ],
    )
    first, second = results[0].logprob, results[1].logprob
    assert first is not None
    assert second is not None
    assert (first.token, results[0].token) == (7, 7)
    assert first.logprob == pytest.approx(float(wanted[0, 7]))
    values, ids = wanted[0].topk(3)
    assert [token for token, _ in first.top] == ids.tolist()
    assert [value for _, value in first.top] == pytest.approx(values.tolist())
    assert second.top == ()
    assert second.logprob == pytest.approx(float(wanted[1].max()))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("options", [{"temperature": 0.0}, {}, {"top_p": 0.5, "frequency_penalty": 1.0}], ids=str)
def test_a_bad_row_is_told_and_the_others_are_not_harmed(bad: float, options: dict[str, float]) -> None:
    logits = random_logits(3)
    fine = [one(logits[i : i + 1], **options).token for i in (0, 2)]
    logits[1, 17] = bad
    results = sample(logits, [row(at=i, **options) for i in range(3)])  # type: ignore[arg-type]
    assert [r.is_valid for r in results] == [True, False, True]
    assert [results[0].token, results[2].token] == fine


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.full((1, 50), -math.inf)
    logits[0, 10:13] = torch.tensor([1.0, 0.5, 0.2])
    for options in ({}, {"top_k": 40}, {"top_p": 0.999}, {"min_p": 0.001}):
        state = ChoiceSampling(params(**options), 0, (1,))
        drawn = {r.token for r in sample(logits, [SampleRow(0, i, state) for i in range(200)])}
        assert drawn == {10, 11, 12}


def test_the_largest_random_number_still_finds_a_token() -> None:
    """The product of the largest number below 1 and the total may round up to the total."""
    largest = torch.tensor([1.0 - 2.0**-53, 0.0], dtype=torch.float64)
    logits = torch.full((2, 30), -math.inf)
    logits[:, 4:9] = torch.rand(2, 5, generator=torch.Generator().manual_seed(1))
    off = torch.tensor([0.0, 0.0], dtype=torch.float64)
    for scores in (logits, logits - 50.0):
        assert token_drawing.choose_unfiltered(scores, largest).tolist() == [8, 4]
        last, first = choose_filtered(scores, torch.tensor([0, 0]), off + 1.0, off, largest).tolist()
        assert (last, first) == (int(logits[0, 4:9].argmin()) + 4, int(logits[1].argmax()))


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}], ids=str)
def test_a_tiny_temperature_is_greedy(options: dict[str, float]) -> None:
    logits = random_logits(1, scale=30.0)
    for temperature in (1e-6, 1e-40):
        assert one(logits, temperature=temperature, **options).token == int(logits.argmax())


DEVICE_FILTERS: list[dict[str, Any]] = [
    {"top_k": 1}, {"top_k": 40}, {"top_k": 100_000}, {"top_p": 0.05}, {"top_p": 0.9}, {"top_p": 0.9999},
    {"min_p": 0.05}, {"min_p": 1.0}, {"top_k": 50, "top_p": 0.8}, {"top_k": 9, "min_p": 0.2},
    {"top_p": 0.95, "min_p": 0.02}, {"top_k": 100, "top_p": 0.7, "min_p": 0.3},
]  # fmt: skip


def heated(rows: int, vocab: int, scale: float) -> torch.Tensor:
    """Scores with the best of each row at 0: plain ones, many ties, all equal, most forbidden, one left."""
    scores = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(rows + vocab)) * scale
    scores[1] = scores[1].round()
    scores[2] = 0.0
    scores[3, : vocab - 3] = -math.inf
    scores[4] = -math.inf
    scores[4, vocab // 2] = 3.0
    return scores - scores.amax(-1, keepdim=True)


@pytest.mark.parametrize("options", DEVICE_FILTERS, ids=str)
@pytest.mark.parametrize("scale", [0.01, 1.0, 10.0])
def test_the_search_draws_what_sorting_draws(options: dict[str, Any], scale: float) -> None:
    scores = heated(8, 2000, scale)
    top_k = torch.tensor([min(options.get("top_k", 0), 2000)] * 8)
    top_p = torch.tensor([options.get("top_p", 1.0)] * 8, dtype=torch.float64)
    min_p = torch.tensor([options.get("min_p", 0.0)] * 8, dtype=torch.float64)
    for draw in range(8):
        uniforms = torch.tensor([sampler.uniform(draw, 0, i) for i in range(8)], dtype=torch.float64)
        expected = choose_filtered(scores, top_k, top_p, min_p, uniforms)
        assert choose_token(scores, top_k, top_p, min_p, uniforms).tolist() == expected.tolist()


def test_rows_with_other_filters_do_not_matter() -> None:
    scores = heated(8, 300, 2.0)
    uniforms = torch.rand(8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    rng = random.Random(4)
    top_k = torch.tensor([rng.choice([0, 5, 80]) for _ in range(8)])
    top_p = torch.tensor([rng.choice([1.0, 0.5, 0.99]) for _ in range(8)], dtype=torch.float64)
    min_p = torch.tensor([rng.choice([0.0, 0.1]) for _ in range(8)], dtype=torch.float64)
    together = choose_token(scores, top_k, top_p, min_p, uniforms).tolist()
    alone = [
        int(choose_token(*(each[i : i + 1] for each in (scores, top_k, top_p, min_p, uniforms)))) for i in range(8)
    ]
    assert together == alone


def test_the_smallest_and_the_largest_random_number_find_a_kept_token() -> None:
    scores = heated(6, 50, 1.0)
    uniforms = torch.tensor([0.0, 1.0 - 2.0**-53] * 3, dtype=torch.float64)
    for options in DEVICE_FILTERS:
        arguments = (
            torch.tensor([min(options.get("top_k", 0), 50)] * 6),
            torch.tensor([options.get("top_p", 1.0)] * 6, dtype=torch.float64),
            torch.tensor([options.get("min_p", 0.0)] * 6, dtype=torch.float64),
            uniforms,
        )
        assert choose_token(scores, *arguments).tolist() == choose_filtered(scores, *arguments).tolist()


def test_a_whole_sample_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(5)
    logits = torch.randn(24, 3000, generator=torch.Generator().manual_seed(6)) * 4
    rows = []
    for i in range(24):
        options: dict[str, Any] = {"temperature": rng.choice([0.0, 0.7, 1.3]), "seed": i} | rng.choice(DEVICE_FILTERS)
        options |= rng.choice([{}, {"frequency_penalty": 0.7}, {"bad_words": ((5,),)}])
        rows.append(SampleRow(i, i % 5, ChoiceSampling(SamplingParams(max_tokens=99, **options), 0, range(20))))
    expected = sampler.sample(logits, rows)
    monkeypatch.setattr(sampler, "choose_filtered", partial(choose_token, backend="reference"))
    assert [r.token for r in sampler.sample(logits, rows)] == [r.token for r in expected]


def test_arguments_that_do_not_fit_are_named() -> None:
    scores, one = heated(5, 20, 1.0), torch.ones(5, dtype=torch.float64)
    top_k = torch.zeros(5, dtype=torch.int64)
    with pytest.raises(ValueError, match="one number a row"):
        choose_token(scores, top_k[:4], one, one, one)
    with pytest.raises(TypeError, match=r"expected torch\.float64, got torch\.float32"):
        choose_token(scores, top_k, one.float(), one, one)


@pytest.mark.parametrize("rows", [1, 4, 9])
@pytest.mark.parametrize("vocab", [49_152, 151_936, 1_000, 96, 259])
def test_likeliest_is_the_first_maximum(rows: int, vocab: int) -> None:
    """Of ties, NaN and rows without a finite number, too, in vocabularies with and without pieces."""
    dice = torch.Generator().manual_seed(rows + vocab)
    for kind in ("ties", "numbers", "nan", "infinite"):
        scores = torch.randn((rows, vocab), generator=dice)
        if kind == "ties":
            scores = scores.round()
        if kind == "nan":
            scores[:, torch.randint(vocab, (3,), generator=dice)] = math.nan
        if kind == "infinite":
            scores.fill_(-math.inf)
        values, tokens = likeliest(scores)
        wanted = [
            row.index(max(row)) if kind != "nan" else row.isnan().nonzero()[0].item()
            for row in (scores if kind == "nan" else scores.tolist())
        ]
        assert tokens.tolist() == wanted, kind
        torch.testing.assert_close(values, scores.amax(dim=-1), rtol=0, atol=0, equal_nan=True)
