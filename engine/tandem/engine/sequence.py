"""One choice of a request (its tokens and block tables) and the request that its choices belong to. No policy.

tokens    │ prompt ……………………… │ outputs ……………… │
          0        computed ▲  prompt_tokens        length
computed: KV of tokens [0, computed) is in the pool, save for that behind a window. Sampling needs computed == length;
decoding is length - 1. left: how many leading blocks of a group's table are behind its window and no longer its own;
GONE stands for them, and nothing reads it.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as AbstractSequence
from concurrent.futures import Future
from enum import Enum, auto
from typing import TYPE_CHECKING

from tandem.core.block_hash import BlockHash
from tandem.core.handoff import ChoiceState
from tandem.core.ids import BlockId, ChoiceIndex
from tandem.core.ledger import Holder, HoldKind
from tandem.core.state_enums import FinishReason
from tandem.engine.request import EngineRequest, RequestKind
from tandem.engine.sampling_state import ChoiceSampling

if TYPE_CHECKING:
    from tandem.engine.output_grammars import CompiledGrammar

GONE = BlockId(0)
Age = tuple[float, int]
"""(arrival_s, order of arrival in this engine): a request is older than another if its age is smaller."""


class Sequence:
    """One choice: prompt, outputs, how much is computed, and where. Owned by the step loop."""

    __slots__ = (
        "choice", "computed", "finish", "has_sampled", "hashes", "holder", "left", "outputs", "prompt",
        "prompt_tokens", "published", "sampling", "tables",
    )  # fmt: skip

    def __init__(
        self,
        request: EngineRequest,
        choice: int,
        outputs: AbstractSequence[int],
        groups: int,
        eos_token_ids: Collection[int] = (),
    ) -> None:
        self.choice = ChoiceIndex(choice)
        self.prompt = request.prompt
        self.prompt_tokens = len(request.prompt)
        self.outputs = list(outputs)
        self.computed = 0
        self.finish: FinishReason | None = None
        self.has_sampled = False
        self.hashes: list[BlockHash] = list(request.hashes)
        self.published = 0
        self.tables: tuple[list[BlockId], ...] = tuple([] for _ in range(groups))
        self.left = [0] * groups
        self.holder = Holder(HoldKind.REQUEST, f"{request.key}#{choice}")
        self.sampling = ChoiceSampling(request.sampling, choice, request.prompt, outputs, eos_token_ids)

    @property
    def length(self) -> int:
        """Prompt and output tokens."""
        return self.prompt_tokens + len(self.outputs)

    def slice(self, start: int, end: int) -> AbstractSequence[int]:
        """Tokens [start, end) of prompt and outputs."""
        prompt_tokens = self.prompt_tokens
        if end <= prompt_tokens:
            return self.prompt[start:end]
        outputs = self.outputs[max(0, start - prompt_tokens) : end - prompt_tokens]
        return outputs if start >= prompt_tokens else [*self.prompt[start:], *outputs]

    def append(self, token: int) -> None:
        """Add a sampled token."""
        self.outputs.append(token)
        self.sampling.count(token)
        self.has_sampled = True

    def forget(self) -> None:
        """Drop the tables and everything computed; the ledger's side is the caller's."""
        self.computed = self.published = 0
        self.tables, self.left = tuple([] for _ in self.tables), [0] * len(self.tables)

    def held(self, group: int) -> list[BlockId]:
        """The blocks of one group's table that it still has, in logical order."""
        return self.tables[group][self.left[group] :]


class QueueState(Enum):
    """Where the scheduler keeps a request."""

    WAITING = auto()
    RUNNING = auto()
    PARKED = auto()
    """PREFILL_ONLY, all first tokens sampled; holds its blocks until released."""
    GONE = auto()


class RequestState:
    """A request in the engine. Until it is forked only `leader` computes: the prompt, once for all choices."""

    __slots__ = (
        "age",
        "cached_blocks",
        "cached_tokens",
        "compiling",
        "has_grammar",
        "is_forked",
        "is_preempted",
        "is_prefill_only",
        "live",
        "lost_tokens",
        "place",
        "request",
        "scored",
        "sequences",
        "spare_blocks",
        "spare_holder",
    )  # fmt: skip

    def __init__(
        self,
        request: EngineRequest,
        outputs: tuple[ChoiceState, ...],
        age: Age,
        groups: int,
        eos_token_ids: Collection[int] = (),
    ) -> None:
        given = {state.choice: state for state in outputs}
        self.request = request
        self.age = age
        self.sequences: list[Sequence] = []
        for choice in range(request.sampling.n):
            known = given.get(ChoiceIndex(choice))
            sequence = Sequence(request, choice, known.tokens if known else (), groups, eos_token_ids)
            sequence.finish = known.finish if known else None
            self.sequences.append(sequence)
        self.live = [sequence for sequence in self.sequences if sequence.finish is None]
        self.is_prefill_only = request.kind is RequestKind.PREFILL_ONLY
        self.is_forked = len(self.live) <= 1
        self.is_preempted = False
        self.lost_tokens = 0
        self.has_grammar = bool(request.sampling.grammar)
        self.compiling: Future[CompiledGrammar] | None = None  # no choice samples until its grammar is there
        self.place = QueueState.WAITING
        self.cached_tokens: int | None = None
        self.scored = 0 if request.sampling.prompt_logprobs is not None else len(request.prompt) - 1
        self.cached_blocks = 0
        self.spare_blocks = 0
        self.spare_holder = Holder(HoldKind.REQUEST, f"{request.key}#spare")

    @property
    def leader(self) -> Sequence:
        """The choice that computes the prompt; the first one still alive."""
        return self.live[0] if self.live else self.sequences[0]

    @property
    def holders(self) -> list[Holder]:
        """All holders that may hold blocks for it as a request."""
        return [*(sequence.holder for sequence in self.sequences), self.spare_holder]

    @property
    def rank(self) -> tuple[bool, Age]:
        """Order of return and admission: preempted ones foremost, then the oldest."""
        return (not self.is_preempted, self.age)

    @property
    def computed_tokens(self) -> int:
        """Tokens with KV here, computed or found cached; the prompt counts once."""
        others = sum(max(0, other.computed - other.prompt_tokens) for other in self.live if other is not self.leader)
        return self.leader.computed + others

    def goal(self, sequence: Sequence) -> int:
        """Tokens that `sequence` can compute now: all it has, or the prompt if it still has to be forked."""
        return sequence.length if self.is_forked else sequence.prompt_tokens

    @property
    def unscored_tokens(self) -> int:
        """Prompt tokens that must be computed here, because the logits behind them are requested."""
        return len(self.request.prompt) - 1 - self.scored

    def scoring(self, sequence: Sequence, start: int, end: int) -> range:
        """Positions among [start, end) with requested logits: they give the probability of the next prompt token."""
        return range(max(start, self.scored), min(end, sequence.prompt_tokens - 1))

    def reusable_tokens(self, goal: int) -> int:
        """Leading tokens of `goal` that may come from the cache: not the last, nor those with requested logits."""
        return min(goal - 1, self.scored) if self.unscored_tokens else goal - 1

    def decoding(self) -> list[Sequence]:
        """Choices that lack the KV of their last output token alone."""
        if not self.is_forked or self.is_prefill_only or self.is_held:
            return []
        return [s for s in self.live if s.prompt_tokens + len(s.outputs) - s.computed == 1 and s.outputs]

    @property
    def is_held(self) -> bool:
        """True while no choice may sample: the grammar is compiled, or a mask of it takes long."""
        return self.has_grammar and (self.compiling is not None or any(choice.sampling.is_held for choice in self.live))

    def catching_up(self) -> list[Sequence]:
        """Choices with prompt or known output tokens to compute before they sample."""
        if not self.is_forked:
            return [self.live[0]]
        if self.is_prefill_only:
            return [s for s in self.live if not s.has_sampled]
        return [s for s in self.live if s.length - s.computed > 1 or not s.outputs]

    def sampling_choices(self, sequence: Sequence, end: int) -> list[Sequence]:
        """Choices that sample from the logits of token `end` - 1 of `sequence`."""
        if self.is_forked:
            return [sequence] if end == sequence.length else []
        return [s for s in self.live if not s.outputs] if end == sequence.prompt_tokens else []

    @property
    def is_first_token_done(self) -> bool:
        """True when every choice has finished or sampled here."""
        return all(s.has_sampled or s.finish is not None for s in self.sequences)
