"""Sampling settings of a request. Validated once, by the API; every component trusts them after."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from tandem.core.errors import InvalidRequestError
from tandem.core.output_grammar import MAX_GRAMMAR_CHARS
from tandem.core.thought_budget import MAX_TAG_TOKENS, ThoughtBudget

MAX_CHOICES = 16
MAX_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 512
"""Token sequences; a word given as text has two, one of them with a space in front."""
MAX_BAD_WORD_TOKENS = 64
MAX_TOP_K = 2**32 - 1
MAX_PREDICTION_TOKENS = 1 << 17
MIN_REPETITION_PENALTY = 1e-3
"""Below, fp32 scores that are divided by it could overflow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """One request's sampling settings.

    `temperature` 0 means greedy. `top_k` 0 and `top_p` 1 and `min_p` 0 switch their filters off. `seed` is always
    fixed by the router; the random number of a token is a function of (seed, choice, output index) alone, so that any
    worker can continue a request. `logprobs` is the number of alternatives reported besides the chosen token,
    None for no log-probabilities at all. Presence and frequency penalties count output tokens (OpenAI's formula:
    logit -= presence·[count > 0] + frequency·count); repetition_penalty counts prompt and output (the formula of
    Keskar et al. 2019 as in transformers: positive logits are divided, negative ones multiplied).

    Before `min_tokens` tokens no token that would end the answer is chosen. `bad_words` are token sequences; the last
    token of one is not chosen behind its others. Only `allowed_token_ids` are chosen, if there are any.

    The answer follows `grammar`, if there is one (see tandem.core.output_grammar). A stop token without text is chosen
    only where the answer may end by it. Where other settings would leave no token to choose, the grammar decides.

    `thoughts` bounds what the model thinks before it answers: the tokens that it forces come before all else.

    `prediction` are tokens that the client expects; drafts are copied from them. With `without_drafts` nothing is
    drafted but what a grammar forces. Neither changes an answer.

    `prompt_logprobs` asks for the log-probability of every prompt token but the first, and as many alternatives.
    """

    max_tokens: int
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = field(default=())
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: str = ""
    thoughts: ThoughtBudget | None = None
    prediction: tuple[int, ...] = ()
    without_drafts: bool = False

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    def validate(self, vocab_size: int) -> None:
        """Raise InvalidRequestError naming the first field that is out of range."""
        _check("max_tokens", self.max_tokens >= 1, self.max_tokens, "at least 1")
        _check("n", 1 <= self.n <= MAX_CHOICES, self.n, f"between 1 and {MAX_CHOICES}")
        _check_range("temperature", self.temperature, 0.0, 2.0)
        _check("top_p", _finite(self.top_p) and 0.0 < self.top_p <= 1.0, self.top_p, "above 0 and at most 1")
        _check("top_k", 0 <= self.top_k <= MAX_TOP_K, self.top_k, f"between 0 (off) and {MAX_TOP_K}")
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_range("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, 2.0)
        _check("seed", -(2**63) <= self.seed < 2**63, self.seed, "a 64-bit integer")
        self._validate_tokens(vocab_size)
        count = len(self.logit_bias)
        _check("logit_bias", count <= MAX_LOGIT_BIAS, f"{count} entries", f"at most {MAX_LOGIT_BIAS} entries")
        for token, bias in self.logit_bias:
            _check("logit_bias", 0 <= token < vocab_size, token, f"a token id below {vocab_size}")
            _check_range("logit_bias", bias, -100.0, 100.0)
        chars = len(self.grammar)
        _check("grammar", chars <= MAX_GRAMMAR_CHARS, f"{chars} characters", f"at most {MAX_GRAMMAR_CHARS} characters")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            _check(name, count is None or 0 <= count <= MAX_LOGPROBS, count, f"between 0 and {MAX_LOGPROBS}")

    def _validate_tokens(self, vocab_size: int) -> None:
        count = len(self.stop_token_ids)
        _check("stop_token_ids", count <= MAX_STOP_TOKEN_IDS, f"{count} ids", f"at most {MAX_STOP_TOKEN_IDS} ids")
        _check_ids("stop_token_ids", self.stop_token_ids, vocab_size)
        _check("min_tokens", 0 <= self.min_tokens <= self.max_tokens, self.min_tokens,
               f"between 0 and max_tokens, {self.max_tokens}")  # fmt: skip
        _check_ids("allowed_token_ids", self.allowed_token_ids, vocab_size)
        count = len(self.bad_words)
        _check("bad_words", count <= MAX_BAD_WORDS, f"{count} sequences", f"at most {MAX_BAD_WORDS} token sequences")
        for word in self.bad_words:
            _check("bad_words", 1 <= len(word) <= MAX_BAD_WORD_TOKENS, f"a sequence of {len(word)} tokens",
                   f"1 to {MAX_BAD_WORD_TOKENS} tokens long")  # fmt: skip
            _check_ids("bad_words", word, vocab_size)
        count = len(self.prediction)
        _check(
            "prediction", count <= MAX_PREDICTION_TOKENS, f"{count} tokens", f"at most {MAX_PREDICTION_TOKENS} tokens"
        )
        _check_ids("prediction", self.prediction, vocab_size)
        if self.thoughts is not None:
            for name in ("begin", "ends", "closing", "last_closing"):
                tokens = getattr(self.thoughts, name)
                _check("thoughts", len(tokens) <= MAX_TAG_TOKENS, f"{len(tokens)} tokens", f"at most {MAX_TAG_TOKENS}")
                _check_ids("thoughts", tokens, vocab_size)


def _finite(value: float) -> bool:
    return math.isfinite(value)


def _check_range(name: str, value: float, low: float, high: float) -> None:
    _check(name, _finite(value) and low <= value <= high, value, f"between {low:g} and {high:g}")


def _check_ids(name: str, tokens: tuple[int, ...], vocab_size: int) -> None:
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
        wrong = next(token for token in tokens if not 0 <= token < vocab_size)
        _check(name, False, wrong, f"below the vocabulary size {vocab_size}")


def _check(name: str, is_ok: bool, value: object, expected: str) -> None:
    if not is_ok:
        raise InvalidRequestError(f"{name} is {value}", why=f"it must be {expected}", param=name)
