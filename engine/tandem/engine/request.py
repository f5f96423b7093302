"""Inputs of the engine, outputs of a step, and the limits of a request. Plain values; no tensors, no network."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from tandem.core.block_hash import BlockHash
from tandem.core.errors import ContextLengthError, InvalidRequestError
from tandem.core.handoff import ChoiceState, TokenLogprob
from tandem.core.ids import ChoiceIndex, GroupId
from tandem.core.prefill_queue import QueuedWork
from tandem.core.sampling import SamplingParams
from tandem.core.state_enums import FinishReason

_FIRST_CHOICE = ChoiceIndex(0)


class RequestKind(StrEnum):
    """FULL: prefill and decode here. PREFILL_ONLY: stop after the first token and keep the blocks until `cancel`."""

    FULL = "full"
    PREFILL_ONLY = "prefill_only"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One request as the engine sees it. `key` is unique in this engine (request id and attempt)."""

    key: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    hash_root: BlockHash
    kind: RequestKind = RequestKind.FULL
    arrival_s: float = 0.0
    deadline_s: float = math.inf
    """Time after which the answer is useless, on the clock of `arrival_s`."""
    forced: tuple[ChoiceState, ...] = ()
    """Output tokens that are already fixed (a replay); they are computed like a prompt and not reported again."""
    hashes: tuple[BlockHash, ...] = ()
    """Hashes of the prompt's full blocks under `hash_root`, if they were computed already."""

    def under(self, root: BlockHash) -> EngineRequest:
        """The same request, its blocks found and left under another root."""
        return self if root == self.hash_root else dataclasses.replace(self, hash_root=root, hashes=())


@dataclass(slots=True)
class TokenOutput:
    """A chosen token: the sampler fills in the first three, the engine in which request's and which choice's it is.

    `is_valid` is False if the logits held no finite maximum (NaN or infinity). `index` counts output tokens of the
    choice from 0.
    """

    token: int
    logprob: TokenLogprob | None = None
    is_valid: bool = True
    key: str = ""
    choice: ChoiceIndex = _FIRST_CHOICE
    index: int = 0
    finish: FinishReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSlice:
    """The prompt tokens [start, end) of a request that one step computes; none of a PREFILL_ONLY replay that found its
    whole prompt cached."""

    key: str
    start: int
    end: int
    is_last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobs:
    """Log-probabilities of the prompt tokens from `position` on, each given the tokens before it."""

    key: str
    position: int
    logprobs: tuple[TokenLogprob, ...]


LayerHook = Callable[[tuple[PrefillSlice, ...], int, int], None]
"""hook(slices, first_layer, last_layer): the KV of these slices is in the pool for layers [first, last).

Called once with (slices, 0, 0) when the step begins to compute them, then for every group of layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Results of one step. `started_s` and `ended_s` are clock seconds."""

    outputs: tuple[TokenOutput, ...] = ()
    prefilled: tuple[PrefillSlice, ...] = ()
    preempted: tuple[str, ...] = ()
    recomputed_tokens: int = 0
    """Tokens of requests that returned: had at preemption, and not found cached."""
    prefill_tokens: int = 0
    decode_tokens: int = 0
    logit_rows: int = 0
    """Tokens of the step with computed logits."""
    context_tokens: int = 0
    """Stored tokens of the sequences that it computed, including those of the step."""
    attended: float = 0.0
    """Sum over all its tokens (tandem.core.prefill_queue.attended)."""
    started_s: float = 0.0
    ended_s: float = 0.0
    failed: dict[str, Exception] = field(default_factory=dict)
    """Requests that can no longer run (by key) and why; they hold nothing any more."""
    admitted: dict[str, int] = field(default_factory=dict)
    """Requests that this step took from the queue for the first time, with their cached prompt tokens."""
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEvent:
    """A block's hash became findable in this engine (stored) or stopped being so (removed)."""

    is_stored: bool
    group: GroupId
    hash: BlockHash


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """Requests that wait or run, sequences that decode, and the prompt tokens that still have to be computed.

    `queue`: these tokens request by request, with when they are due (engine clock).
    """

    queued_requests: int
    running_requests: int
    queued_tokens: int
    decoding_sequences: int = 0
    queue: tuple[QueuedWork, ...] = ()


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
    sampling: SamplingParams, outputs: Sequence[int], length: int, eos: frozenset[int], max_model_len: int,
    *, is_complete: bool = False,
) -> FinishReason | None:  # fmt: skip
    """Return the reason why a choice with these outputs ends, or None. `length` counts prompt and outputs.
    `is_complete`: the last one ended it by its grammar."""
    if not outputs:
        return None
    if is_complete:
        return FinishReason.STOP
    token = outputs[-1]
    is_ending = (token in eos and not sampling.ignore_eos) or token in sampling.stop_token_ids
    if is_ending and len(outputs) > sampling.min_tokens:
        return FinishReason.STOP
    if len(outputs) >= sampling.max_tokens or length >= max_model_len:
        return FinishReason.LENGTH
    return None
