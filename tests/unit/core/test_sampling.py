"""Sampling parameters are refused by name, at their limits."""

import dataclasses
import math

import pytest

from tandem.core.errors import InvalidRequestError
from tandem.core.sampling import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)

BASE = SamplingParams(max_tokens=16)

GOOD: list[dict[str, object]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 2.0, "top_p": 1e-9, "top_k": 10**9, "min_p": 1.0, "n": MAX_CHOICES},
    {"presence_penalty": -2.0, "frequency_penalty": 2.0, "repetition_penalty": 1e-3},
    {"seed": -(2**63)},
    {"seed": 2**63 - 1},
    {"stop_token_ids": tuple(range(MAX_STOP_TOKEN_IDS)), "logprobs": MAX_LOGPROBS},
    {"logit_bias": tuple((i % 100, -100.0) for i in range(MAX_LOGIT_BIAS)), "logprobs": 0},
    {"min_tokens": 16, "allowed_token_ids": tuple(range(100)) * 2},
    {"bad_words": ((1,),) * (MAX_BAD_WORDS - 1) + ((2,) * MAX_BAD_WORD_TOKENS,)},
]

BAD: list[tuple[str, object]] = [
    ("max_tokens", 0),
    ("n", 0),
    ("n", MAX_CHOICES + 1),
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", math.nan),
    ("top_p", 0.0),
    ("top_p", 1.1),
    ("top_p", math.nan),
    ("top_k", -1),
    ("top_k", 2**32),
    ("min_p", -0.1),
    ("min_p", math.inf),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", 1e-300),
    ("repetition_penalty", math.inf),
    ("seed", 2**63),
    ("stop_token_ids", (100,)),
    ("stop_token_ids", (-1,)),
    ("stop_token_ids", (1,) * (MAX_STOP_TOKEN_IDS + 1)),
    ("logit_bias", ((100, 1.0),)),
    ("logit_bias", ((1, 100.5),)),
    ("logit_bias", ((1, math.nan),)),
    ("logit_bias", ((1, 1.0),) * (MAX_LOGIT_BIAS + 1)),
    ("min_tokens", -1),
    ("min_tokens", 17),
    ("allowed_token_ids", (5, 100)),
    ("allowed_token_ids", (-1,)),
    ("bad_words", ((),)),
    ("bad_words", ((100,),)),
    ("bad_words", ((1,) * (MAX_BAD_WORD_TOKENS + 1),)),
    ("bad_words", ((1,),) * (MAX_BAD_WORDS + 1)),
    ("logprobs", -1),
    ("logprobs", MAX_LOGPROBS + 1),
]


@pytest.mark.parametrize("change", GOOD, ids=lambda change: ",".join(change) or "default")
def test_limits_are_allowed(change: dict[str, object]) -> None:
    dataclasses.replace(BASE, **change).validate(vocab_size=100)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda part: str(part)[:24])
def test_beyond_the_limits_is_refused_by_name(name: str, value: object) -> None:
    params = dataclasses.replace(BASE, **{name: value})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match=name) as caught:
        params.validate(vocab_size=100)
    assert caught.value.param == name


def test_greedy_is_temperature_zero() -> None:
    assert dataclasses.replace(BASE, temperature=0.0).is_greedy
    assert not BASE.is_greedy
