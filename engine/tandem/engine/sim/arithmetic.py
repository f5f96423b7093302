"""The arithmetic that stands for a model, and the oracle: the expected output, computed without any blocks.

h(t) = mix(h(t-1), token t)          the hash in token t's KV slots
digest = Σ h(t) · BASE^(T-1-t) mod P  over the context, for each KV group; groups are mixed in order
next token = digest mod vocabulary    greedy; (digest, seed, choice, index) mixed, with a temperature
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from tandem.core.handoff import TokenLogprob
from tandem.core.sampling import SamplingParams
from tandem.engine.sampling_state import ChoiceSampling

START = 0x7A6E_D035_16C4_9B01
"""The hash before the first token."""
PRIME = (1 << 61) - 1
BASE = 0x1B87_3593_CC9E_2D51
_MASK = (1 << 64) - 1
_CERTAIN_BIAS = 100.0
_LOG_HALF = -0.6931471805599453
_GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


def mix(a: int, b: int) -> int:
    """A 64-bit hash of two numbers; for a fixed `b` every `a` below 2^64 gives another result."""
    x = (a * 0x9E3779B97F4A7C15 + b * 0xC2B2AE3D27D4EB4F + 0x165667B19E3779F9) & _MASK
    x = (x ^ x >> 29) * 0xBF58476D1CE4E5B9 & _MASK
    return x ^ x >> 32


def chain(before: int, tokens: Iterable[int]) -> list[int]:
    """The hashes of `tokens`, given the hash `before` of the token before them."""
    hashes = []
    for token in tokens:
        before = mix(before, token)
        hashes.append(before)
    return hashes


def fold(value: int, hashes: Iterable[int]) -> int:
    """Extend the digest `value` of a context (0 = empty) by `hashes`."""
    for each in hashes:
        value = (value * BASE + each) % PRIME
    return value


def combine(values: Iterable[int]) -> int:
    """One digest, below 2^61, from those of a rank's KV groups, in order."""
    total = 0
    for value in values:
        total = mix(total, value)
    return total >> 3


def choose(
    digest: int, params: SamplingParams, choice: int, index: int, *, vocab_size: int, eos_token_ids: Collection[int],
    banned: Collection[int] = (), mask: bytes | None = None,
) -> int:  # fmt: skip
    """The token after a context with this digest.

    End-of-sequence tokens are avoided, so that answers have the length that was asked for; so are tokens biased by
    -100. A bias of +100 forces its token, an end-of-sequence one too. `banned` tokens and those that are not allowed
    are never chosen while there are others. Filters and penalties change nothing. `mask`: tokens that a grammar
    allows, a bit each; nothing else is chosen.
    """
    allowed = sorted(set(params.allowed_token_ids))
    if mask is not None:
        fitting = [token for token in range(vocab_size) if mask[token >> 3] >> (token & 7) & 1]
        allowed = [token for token in fitting if token in allowed] or fitting
    avoided = {*eos_token_ids, *banned}
    for token, bias in params.logit_bias:
        if bias >= _CERTAIN_BIAS and token not in banned and (not allowed or token in allowed):
            return token
        if bias <= -_CERTAIN_BIAS:
            avoided.add(token)
    key = digest if params.is_greedy else mix(mix(digest, params.seed & _MASK), choice << 32 | index)
    size = len(allowed) or vocab_size
    for step in range(size):
        place = (key + step) % size
        token = allowed[place] if allowed else place
        if token not in avoided:
            return token
    return allowed[key % size] if allowed else key % size


def report_logprob(token: int, params: SamplingParams, vocab_size: int) -> TokenLogprob | None:
    """Made-up log-probabilities that are valid: 1/2 for the token, 1/4, 1/8 … for the ids after it."""
    if params.logprobs is None:
        return None
    count = min(params.logprobs, vocab_size)
    top = tuple(((token + place) % vocab_size, _LOG_HALF * (place + 1)) for place in range(count))
    return TokenLogprob(token=token, logprob=_LOG_HALF, top=top)


def prompt_logprob(digest: int, token: int, params: SamplingParams, vocab_size: int) -> TokenLogprob:
    """A made-up log-probability of a prompt token behind a context with this digest: any other context gives another.

    Valid beside the alternatives, the ids after the token with 1/4, 1/8 …
    """
    count = min(params.prompt_logprobs or 0, vocab_size)
    top = tuple(((token + place + 1) % vocab_size, _LOG_HALF * (place + 2)) for place in range(count))
    return TokenLogprob(token=token, logprob=_LOG_HALF - mix(digest, token) % 4096 / 4096, top=top, rank=1 + count)


def expected_tokens(
    prompt: Sequence[int],
    count: int,
    vocab_size: int,
    *,
    eos_token_ids: Collection[int] = (),
    outputs: Sequence[int] = (),
    sampling: SamplingParams | None = None,
    choice: int = 0,
    groups: int = 1,
) -> list[int]:
    """The oracle: the `count` tokens that a simulated engine generates after `prompt` and `outputs` (forced ones).

    Greedy without `sampling`, of which temperature, seed, bias and what forbids tokens count: stop tokens do not end
    the list. `groups` is the number of KV groups.
    """
    params = sampling or _GREEDY
    hashes = chain(START, (*prompt, *outputs))
    before, value = hashes[-1], fold(0, hashes)
    state = ChoiceSampling(params, choice, prompt, outputs, eos_token_ids)
    tokens: list[int] = []
    for index in range(len(outputs), len(outputs) + count):
        digest = combine([value] * groups)
        forced = state.forced
        token = forced if forced is not None else choose(
            digest, params, choice, index, vocab_size=vocab_size, eos_token_ids=eos_token_ids,
            banned=state.banned(index, vocab_size),
        )  # fmt: skip
        state.count(token)
        tokens.append(token)
        before = mix(before, token)
        value = fold(value, (before,))
    return tokens
