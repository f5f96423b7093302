"""Inputs of the engine and outputs of a step. Plain values; no tensors, no network."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from tandem.core.block_hash import BlockHash
from tandem.core.handoff import ChoiceState, TokenLogprob
from tandem.core.ids import ChoiceIndex, GroupId
from tandem.core.lifecycle import FinishReason
from tandem.core.prefill_queue import QueuedWork
from tandem.core.sampling import SamplingParams


class RequestKind(StrEnum):
    """FULL: prefill and decode here. PREFILL_ONLY: stop after the first token and keep the blocks until `release`."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOutput:
    """One sampled token. `index` counts output tokens of the choice from 0."""

    key: str
    choice: ChoiceIndex
    index: int
    token: int
    logprob: TokenLogprob | None = None
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
