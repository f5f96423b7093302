"""Forbidden tokens against transformers' processors, and what is left where everything would be forbidden."""

import math
import random
from typing import Any

import pytest
import torch
from transformers import MinNewTokensLengthLogitsProcessor, NoBadWordsLogitsProcessor

from tandem.core.sampling import SamplingParams
from tandem.engine.logits_processors import apply_masks
from tandem.engine.runner_protocol import SampleRow
from tandem.engine.sampler import sample
from tandem.engine.sampling_state import ChoiceSampling

VOCAB = 40
EOS = (1, 2)


def row(outputs: list[int], **options: object) -> SampleRow:
    settings = {"max_tokens": 100, **options}
    state = ChoiceSampling(SamplingParams(**settings), 0, (3, 4), outputs, EOS)  # type: ignore[arg-type]
    return SampleRow(0, len(outputs), state)


def masked(scores: torch.Tensor, *rows: SampleRow) -> torch.Tensor:
    result = scores.repeat(len(rows), 1)
    apply_masks(result, rows)
    return result


def test_bad_words_as_in_transformers() -> None:
    rng = random.Random(5)
    for trial in range(200):
        words = [[rng.randrange(6, 12) for _ in range(rng.randrange(1, 4))] for _ in range(rng.randrange(1, 6))]
        outputs = [rng.randrange(6, 12) for _ in range(rng.randrange(8))]
        scores = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(trial))
        processor = NoBadWordsLogitsProcessor(words, eos_token_id=list(EOS))
        wanted = processor(torch.tensor([outputs], dtype=torch.int64), scores.clone())
        got = masked(scores, row(outputs, bad_words=tuple(map(tuple, words))))
        assert torch.equal(got, wanted), (words, outputs)


@pytest.mark.parametrize("length", [0, 1, 3, 4, 7])
def test_min_tokens_as_in_transformers(length: int) -> None:
    scores = torch.randn(1, VOCAB)
    stops = (7, 9)
    processor = MinNewTokensLengthLogitsProcessor(0, 4, [*EOS, *stops], device="cpu")
    wanted = processor(torch.zeros(1, length, dtype=torch.int64), scores.clone())
    got = masked(scores, row([5] * length, min_tokens=4, stop_token_ids=stops))
    assert torch.equal(got, wanted)


def test_min_tokens_leaves_an_ignored_end_alone() -> None:
    scores = torch.zeros(1, VOCAB)
    got = masked(scores, row([], min_tokens=4, ignore_eos=True, stop_token_ids=(7,)))
    assert got[0].isfinite().nonzero()[:, 0].tolist() == [token for token in range(VOCAB) if token != 7]


def test_allowed_tokens_keep_their_scores() -> None:
    scores = torch.randn(1, VOCAB)
    got = masked(scores, row([], allowed_token_ids=(30, 4, 4, 9)))[0]
    assert got.isfinite().nonzero()[:, 0].tolist() == [4, 9, 30]
    assert torch.equal(got[[4, 9, 30]], scores[0, [4, 9, 30]])


def test_rows_do_not_disturb_each_other() -> None:
    scores = torch.randn(1, VOCAB)
    rows = [
        row([]),
        row([], allowed_token_ids=(5, 6)),
        row([8], bad_words=((8, 9), (3,))),
        row([], min_tokens=1),
        row([5], min_tokens=1),
    ]
    together = masked(scores, *rows)
    assert torch.equal(together, torch.cat([masked(scores, each) for each in rows]))
    assert [int((each == -math.inf).sum()) for each in together] == [0, VOCAB - 2, 2, 2, 0]


@pytest.mark.parametrize(
    "options",
    [
        {"allowed_token_ids": EOS, "min_tokens": 3},
        {"allowed_token_ids": (6, 7), "bad_words": ((6,), (7,))},
        {"bad_words": tuple((token,) for token in range(VOCAB))},
    ],
    ids=["only ends are allowed", "all that is allowed is bad", "everything is bad"],
)
def test_something_is_always_left(options: dict[str, object]) -> None:
    got = masked(torch.zeros(1, VOCAB), row([], **options))[0]
    left = set(got.isfinite().nonzero()[:, 0].tolist())
    assert left == set(options.get("allowed_token_ids", range(VOCAB)))  # type: ignore[call-overload]


FILTERS = [{}, {"top_k": 3}, {"top_k": 50}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 20, "top_p": 0.9}]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_draws_are_those_of_scores_without_the_forbidden_tokens(filters: dict[str, float]) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(1, 2000, generator=generator) * 3
    allowed = tuple(range(100, 140))
    without = torch.full_like(logits, -math.inf)
    without[:, 100:140] = logits[:, 100:140]
    for seed in range(60):
        plain = SamplingParams(max_tokens=9, seed=seed, **filters)  # type: ignore[arg-type]
        limited = SamplingParams(max_tokens=9, seed=seed, allowed_token_ids=allowed, **filters)  # type: ignore[arg-type]
        (wanted,) = sample(without, [SampleRow(0, 2, ChoiceSampling(plain, 1, ()))])
        (got,) = sample(logits, [SampleRow(0, 2, ChoiceSampling(limited, 1, ()))])
        assert got.token == wanted.token
        assert got.token in allowed


def test_greedy_takes_the_best_that_may_be_chosen() -> None:
    logits = torch.arange(VOCAB, dtype=torch.float32)[None]
    greedy = {"temperature": 0.0, "bad_words": ((VOCAB - 1,), (20, VOCAB - 2))}
    tokens = [sample(logits, [row(outputs, **greedy)])[0].token for outputs in ([], [20], [20, 5])]
    assert tokens == [VOCAB - 2, VOCAB - 3, VOCAB - 2]


@pytest.mark.parametrize("options", [{}, {"logprobs": 2}, {"temperature": 0.0}], ids=str)
def test_logits_are_written_over_only_where_nothing_else_reads_them(options: dict[str, Any]) -> None:
    given = torch.randn(3, VOCAB)
    rows = [row([], seed=seed, allowed_token_ids=(5, 6, 7), **options) for seed in range(3)]
    for place, one in enumerate(rows):
        one.row = place
    logits, kept = given.clone(), given.clone()
    expected = [(one.token, one.logprob) for one in sample(kept, rows)]
    assert [(one.token, one.logprob) for one in sample(logits, rows, may_change=True)] == expected
    assert torch.equal(kept, given)
    assert torch.equal(logits, given) is ("logprobs" in options)


def test_logprobs_stay_those_of_the_model() -> None:
    logits = torch.randn(1, VOCAB)
    (result,) = sample(logits, [row([], temperature=0.0, allowed_token_ids=(5,), logprobs=VOCAB)])
    assert result.logprob is not None
    raw = logits.log_softmax(-1)[0]
    assert result.logprob.logprob == pytest.approx(float(raw[5]))
    assert len(result.logprob.top) == VOCAB


def test_words_are_looked_for_in_the_output_alone() -> None:
    state = row([], bad_words=((3, 4, 8),))
    assert state.sampling.banned(0, VOCAB) == set(), "the prompt ends with 3, 4"
    for token in (9, 3, 4):
        state.sampling.count(token)
    assert state.sampling.banned(3, VOCAB) == {8}


def test_a_token_beyond_the_vocabulary_is_no_token_of_the_next_row() -> None:
    scores = torch.zeros(2, VOCAB)
    beyond = ChoiceSampling(SamplingParams(max_tokens=9, min_tokens=2), 0, (3, 4), (), (VOCAB + 3,))
    with pytest.raises(IndexError, match=f"token {VOCAB + 3} is beyond the vocabulary of {VOCAB}"):
        apply_masks(scores, [SampleRow(0, 0, beyond), row([])])
    assert scores.isfinite().all()
