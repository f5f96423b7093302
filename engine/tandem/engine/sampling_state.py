"""Sampling state of one choice between steps. No tensors; the arithmetic is in sampler and logits_processors."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from tandem.core.sampling import SamplingParams
from tandem.engine.thought_counter import ThoughtCounter

if TYPE_CHECKING:
    from concurrent.futures import Future

    from tandem.engine.draft_controller import Drafter
    from tandem.engine.output_matcher import OutputMatcher


class ChoiceSampling:
    """Sampling state of one choice: its settings and the tokens it has seen.

    `eos_token_ids` are the model's; `min_tokens` keeps them back. `matcher` follows the grammar, once `follow` was
    called; None without one. `drafter` copies drafts from texts, where that was asked for. `thoughts`: None = they have
    no bound, or are over.
    """

    __slots__ = (
        "allowed_ids", "changes_scores", "choice", "counts", "drafter", "ending", "has_bias", "has_filter", "has_mask",
        "has_penalty", "is_plain", "matcher", "new_ids", "params", "prompt", "prompt_ids", "recent", "thoughts",
        "words",
    )  # fmt: skip

    def __init__(
        self,
        params: SamplingParams,
        choice: int,
        prompt: Sequence[int],
        outputs: Iterable[int] = (),
        eos_token_ids: Collection[int] = (),
    ) -> None:
        self.params, self.choice = params, choice
        self.has_penalty = bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0)
        self.has_bias = bool(params.logit_bias)
        self.has_filter = bool(params.top_k or params.top_p < 1.0 or params.min_p > 0.0)
        self.has_mask = bool(params.min_tokens or params.bad_words or params.allowed_token_ids)
        self.matcher: OutputMatcher | None = None
        self.drafter: Drafter | None = None
        self.thoughts = None if params.thoughts is None else ThoughtCounter(params.thoughts)
        self._classify()
        self.prompt = frozenset(prompt) if params.repetition_penalty != 1.0 else frozenset()
        self.prompt_ids = array("q", sorted(self.prompt))
        self.counts: dict[int, int] = {}
        self.new_ids = array("q")  # output tokens that the prompt does not have
        self.allowed_ids = array("q", sorted(set(params.allowed_token_ids)))
        self.ending = frozenset(_ending_tokens(params, eos_token_ids) if params.min_tokens else ())
        self.words: dict[tuple[int, ...], set[int]] = {}  # the last tokens of bad words by what stands before them
        for word in params.bad_words:
            self.words.setdefault(word[:-1], set()).add(word[-1])
        self.recent: deque[int] = deque(maxlen=max(map(len, self.words), default=0))
        for token in outputs:
            self.count(token)

    def count(self, token: int) -> None:
        """Record an output token."""
        self.recent.append(token)
        if self.matcher is not None:
            self.matcher.advance(token)
        if self.drafter is not None:
            self.drafter.add(token)
        if self.thoughts is not None:
            self.thoughts.add(token)
            if self.thoughts.is_over:
                self.thoughts = None
                self._classify()
        if not self.has_penalty:
            return
        seen = self.counts.get(token, 0)
        self.counts[token] = seen + 1
        if not seen and token not in self.prompt:
            self.new_ids.append(token)

    def follow(self, matcher: OutputMatcher, outputs: Sequence[int]) -> None:
        """Follow a grammar from now on; `matcher` is at its beginning, `outputs` are already chosen."""
        matcher.replay(outputs)
        matcher.start()
        self.matcher = matcher

    def drafts(self, most: int) -> tuple[int, ...]:
        """At most `most` output tokens that probably come next by the grammar; none unless `may_draft`."""
        return () if self.matcher is None or most < 1 or not self.may_draft else self.matcher.drafts(most)

    @property
    def may_draft(self) -> bool:
        """False where scores depend on the tokens before in more than the logits and the grammar."""
        return self.thoughts is None and not self.has_penalty and not self.has_mask

    @property
    def has_offer(self) -> bool:
        """True if the drafter has tokens that may be next."""
        return (
            self.drafter is not None
            and self.matcher is None
            and self.may_draft
            and self.drafter.span.source is not None
        )

    @property
    def is_complete(self) -> bool:
        """True if there is a grammar, and the last token ended the answer by it."""
        return self.matcher is not None and self.matcher.is_complete

    @property
    def is_held(self) -> bool:
        """True while no row is to be planned, because its grammar's mask takes long."""
        return self.matcher is not None and self.matcher.is_held

    @property
    def pending_masks(self) -> Sequence[Future[list[bytes]]]:
        """Masks of its grammar that are computed, or known."""
        return () if self.matcher is None else self.matcher.pending

    def take_late(self) -> bool:
        """True if the step had no mask of the grammar in time: its token is to be discarded."""
        return self.matcher is not None and self.matcher.take_late()

    @property
    def grammar_error(self) -> str:
        """The reason why its grammar cannot be followed any further; "" = it can, or there is none."""
        return "" if self.matcher is None else self.matcher.error

    @property
    def forced(self) -> int | None:
        """The token that has to come next; None = the model chooses."""
        return None if self.thoughts is None else self.thoughts.forced

    def banned(self, index: int, vocab_size: int) -> set[int]:
        """Tokens that may not be output `index`: those that would end the answer too early, and last ones of bad words.

        Empty where nothing would be left to choose: an answer that may not end goes on, with any allowed token.
        """
        banned = set(self.ending) if index < self.params.min_tokens else set()
        if self.words:
            recent = tuple(self.recent)
            for before in {len(word) for word in self.words}:
                if before <= len(recent):
                    banned |= self.words.get(recent[len(recent) - before :], set())
        has_none_left = banned.issuperset(self.allowed_ids) if self.allowed_ids else len(banned) >= vocab_size
        return set() if has_none_left else banned

    def _classify(self) -> None:
        params = self.params
        has_mask = self.has_mask or bool(params.grammar) or self.thoughts is not None
        self.changes_scores = self.has_penalty or self.has_bias or has_mask
        self.is_plain = params.is_greedy and not self.changes_scores and params.logprobs is None


def _ending_tokens(params: SamplingParams, eos_token_ids: Collection[int]) -> set[int]:
    """Tokens that would end an answer."""
    return {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
