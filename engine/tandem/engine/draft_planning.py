"""Adds drafts to the decodes of a step: few enough for it to stay hardly longer, and none for which a block would have
to be taken from another request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tandem.core.config import SpeculationMode
from tandem.core.span_copy import SpanCopy
from tandem.engine.draft_controller import MOST_DRAFTS, DraftController

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from tandem.engine.block_manager import BlockSpace
    from tandem.engine.scheduler import StepItem
    from tandem.engine.sequence import RequestState

MOST_FORCED = 8
"""Drafts of a grammar, of one choice in a step."""


class DraftPlanner:
    """Of one engine; for the step loop's thread. `ending`: the model's tokens that end an answer."""

    def __init__(self, space: BlockSpace, rows: int, speculation: SpeculationMode, ending: Collection[int]) -> None:
        self._space, self._rows, self._speculation = space, rows, speculation
        self._ending = frozenset(ending)
        self.controller = DraftController()

    def follow(self, state: RequestState) -> None:
        """Give each choice of a new request a drafter, if there may be text to copy."""
        sampling, speculation = state.request.sampling, self._speculation
        copies = speculation is SpeculationMode.COPY
        if state.is_prefill_only or sampling.without_drafts or speculation is SpeculationMode.OFF or self._rows < 2:
            return
        if not copies and not sampling.prediction:
            return
        ending = {*sampling.stop_token_ids, *self._ending}
        prompt = state.request.prompt if copies else ()
        for sequence in state.live:
            if sequence.sampling.may_draft and not sampling.grammar:
                span = SpanCopy(sampling.prediction, prompt, ending, sampling.max_tokens)
                sequence.sampling.drafter = self.controller.drafter(span, sequence.outputs)

    def plan(self, items: Sequence[StepItem], limit: int) -> None:
        """Add drafts to `items`, which are decodes, oldest first: those of grammars, which nearly always hold, and of
        copied text as many as pay."""
        room = min(self._rows, limit) - len(items)
        offers: list[tuple[StepItem, SpanCopy, int]] = []
        for item in items:
            if room <= 0:
                return
            sampling = item.sequence.sampling
            left = item.state.request.sampling.max_tokens - len(item.sequence.outputs) - 1
            if sampling.has_offer and sampling.drafter is not None:
                offers.append((item, sampling.drafter.span, min(left, MOST_DRAFTS)))
            else:
                room -= self._add(item, sampling.drafts(min(room, left, MOST_FORCED)))
        if room > 0 and offers:
            decodes = len(items) + sum(len(item.drafts) for item in items)
            counts = self.controller.counts(decodes, [(span, most) for _, span, most in offers], room)
            for (item, span, _), count in zip(offers, counts, strict=True):
                self._add(item, span.offer(count))

    def _add(self, item: StepItem, drafts: tuple[int, ...]) -> int:
        """Number of drafts that were added."""
        if not drafts or not self._space.extend_ahead(item.state, item.sequence, item.end + len(drafts)):
            return 0
        item.drafts = drafts
        return len(drafts)
