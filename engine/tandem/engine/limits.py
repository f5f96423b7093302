"""Rules for requests that can never run here, and for the end of a choice. Pure functions of a request."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.core.errors import ContextLengthError, InvalidRequestError
from tandem.core.lifecycle import FinishReason
from tandem.core.sampling import SamplingParams
from tandem.engine.request import EngineRequest, RequestKind


def check_request(
    request: EngineRequest,
    *,
    max_model_len: int,
    vocab_size: int,
    max_sequences: int,
    block_tokens: int,
    pool_blocks: int,
) -> None:
    """Raise InvalidRequestError or its ContextLengthError if even an idle engine could not run `request`."""
    prompt, sampling = request.prompt, request.sampling
    if not prompt:
        raise InvalidRequestError("the prompt is empty", why="at least one token is needed", param="prompt")
    for name, tokens in (("prompt", prompt), *(("forced", choice.tokens) for choice in request.forced)):
        if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
            raise InvalidRequestError(
                f"{name} has token ids from {min(tokens)} to {max(tokens)}",
                why=f"they must be between 0 and {vocab_size - 1}",
                param=name,
            )
    _check_choices(request, max_sequences)
    wanted = len(prompt) + sampling.max_tokens
    if wanted > max_model_len:
        raise ContextLengthError(
            f"{len(prompt)} prompt tokens and {sampling.max_tokens} for the answer are {wanted} tokens",
            why=f"the context length here is {max_model_len}",
            todo="shorten the prompt or lower max_tokens",
            param="messages",
        )
    blocks = most_blocks(request, block_tokens)
    if blocks > pool_blocks:
        raise ContextLengthError(
            f"the request needs up to {blocks} KV blocks",
            why=f"this worker has {pool_blocks}",
            todo="shorten the prompt, or lower max_tokens or n",
            param="messages",
        )


def _check_choices(request: EngineRequest, max_sequences: int) -> None:
    n = request.sampling.n
    if n > max_sequences:
        raise InvalidRequestError(f"n is {n}", why=f"at most {max_sequences} choices run at once here", param="n")
    choices = [choice.choice for choice in request.forced]
    if len(set(choices)) != len(choices) or any(not 0 <= choice < n for choice in choices):
        raise InvalidRequestError(f"forced output for choices {choices}", why=f"there are {n} choices", param="forced")
    if sum(choice.finish is not None for choice in request.forced) == n:
        raise InvalidRequestError("every choice is finished", why="nothing is left to compute", param="forced")


def most_blocks(request: EngineRequest, block_tokens: int) -> int:
    """Blocks of one group that `request` can ever hold: full prompt blocks once, the rest for every choice.

    The last output token is never stored. PREFILL_ONLY stores the prompt and forced outputs.
    """
    prompt_tokens, n = len(request.prompt), request.sampling.n
    live = n - sum(choice.finish is not None for choice in request.forced)
    shared, rest = divmod(prompt_tokens, block_tokens)
    if request.kind is RequestKind.FULL:
        outputs = [request.sampling.max_tokens - 1] * live
    else:
        outputs = [len(choice.tokens) for choice in request.forced if choice.finish is None and choice.tokens]
    own = sum(-(-(prompt_tokens + count) // block_tokens) - shared for count in outputs)
    # Choices without outputs share one partial tail; where all write, the last writer keeps it.
    return shared + own + (rest != 0 and len(outputs) < live)


def finish_reason(
    sampling: SamplingParams, outputs: Sequence[int], length: int, eos: frozenset[int], max_model_len: int
) -> FinishReason | None:
    """Return the reason why a choice with these outputs ends, or None. `length` counts prompt and outputs."""
    if not outputs:
        return None
    token = outputs[-1]
    is_ending = (token in eos and not sampling.ignore_eos) or token in sampling.stop_token_ids
    if is_ending and len(outputs) > sampling.min_tokens:
        return FinishReason.STOP
    if len(outputs) >= sampling.max_tokens or length >= max_model_len:
        return FinishReason.LENGTH
    return None
