"""Converts a plan's items to a runner's input, and results to requests; keeps a step that the device computes.

Plain values; imports no torch.
"""

from __future__ import annotations

from tandem.engine.request import PrefillSlice, PromptLogprobs, TokenOutput
from tandem.engine.runner_protocol import Begun, SampleRow, SeqSlice, StepBatch
from tandem.engine.scheduler import StepItem, StepPlan
from tandem.engine.sequence import QueueState


def assemble(items: list[StepItem]) -> tuple[StepBatch, list[SampleRow]]:
    """The batch, and one row for every prompt token that is to be scored and for every taker, in the order of items.

    A token that is not known yet, because the step before chooses it, is 0. Each draft has a sequence and a row.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    sequences: list[SeqSlice] = []
    logit_rows: list[int] = []
    rows: list[SampleRow] = []
    for item in items:
        sequence, start, end = item.sequence, item.start, item.end
        if end - start == 1:
            place = start - sequence.prompt_tokens
            if place < 0:
                token_ids.append(sequence.prompt[start])
            else:
                token_ids.append(sequence.outputs[place] if place < len(sequence.outputs) else 0)
            positions.append(start)
        else:
            token_ids.extend(sequence.slice(start, end))
            positions.extend(range(start, end))
        sequences.append(SeqSlice(end - start, end, sequence.tables))
        first_row = len(token_ids) - (end - start)
        for position in scoring(item):
            token = sequence.prompt[position + 1]
            rows.append(SampleRow(len(logit_rows), 0, sequence.sampling, token))
            logit_rows.append(first_row + position - start)
        if item.sampling_choices:
            for taker in item.sampling_choices:
                rows.append(SampleRow(len(logit_rows), end - taker.prompt_tokens, taker.sampling))
            logit_rows.append(len(token_ids) - 1)
        for count, draft in enumerate(item.drafts, 1):
            sequences.append(SeqSlice(1, end + count, sequence.tables))
            index = end + count - sequence.prompt_tokens
            rows.append(SampleRow(len(logit_rows), index, sequence.sampling, drafts=item.drafts[:count]))
            logit_rows.append(len(token_ids))
            token_ids.append(draft)
            positions.append(end + count - 1)
    return StepBatch(token_ids, positions, sequences, logit_rows), rows


def scoring(item: StepItem) -> range:
    """Positions of prompt tokens with requested logits."""
    return item.state.scoring(item.sequence, item.start, item.end)


def prompt_logprobs(item: StepItem, scored: list[TokenOutput]) -> PromptLogprobs:
    """A step's log-probabilities of prompt tokens; the request records how far they go."""
    positions, state = scoring(item), item.state
    state.scored = positions.stop
    logprobs = tuple(result.logprob for result in scored if result.logprob is not None)
    return PromptLogprobs(key=state.request.key, position=positions.start + 1, logprobs=logprobs)


def prefill_slices(items: list[StepItem]) -> list[PrefillSlice]:
    """The parts of chunks that are prompt tokens.

    A replay may find its whole prompt cached and compute outputs alone: it still gets a slice, for its hand-over.
    """
    return [
        PrefillSlice(
            key=item.state.request.key,
            start=min(item.start, item.sequence.prompt_tokens),
            end=min(item.end, item.sequence.prompt_tokens),
            is_last=item.end >= item.sequence.prompt_tokens,
        )
        for item in items
        if item.start < item.sequence.prompt_tokens or item.state.is_prefill_only
    ]


def is_chunk(item: StepItem) -> bool:
    """True if it is more than one token."""
    return item.end - item.start > 1


def verified(item: StepItem, chosen: list[TokenOutput]) -> list[TokenOutput]:
    """The tokens that hold, of those chosen behind an item's last token and behind each of its drafts: up to the first
    that is another than the draft after it."""
    count = 1
    while count < len(chosen) and chosen[count - 1].token == item.drafts[count - 1]:
        count += 1
    return chosen[:count]


class BegunStep:
    """`begun` is None where the step could not begin, because of `error`. `since_s`: when the step before it ended."""

    def __init__(self, plan: StepPlan, batch: StepBatch, begun: Begun | None, error: Exception | None = None) -> None:
        plan.logit_rows = len(batch.logit_rows)
        self.plan, self.batch, self.begun = plan, batch, begun
        self.since_s = 0.0
        self._error = error
        self._results: list[TokenOutput] | None = None

    def wait(self) -> None:
        """Wait until the device is done with it; an exception is raised by `results`."""
        if self._results is not None or self._error is not None or self.begun is None:
            return
        try:
            self._results = self.begun.results()
        except Exception as error:  # noqa: BLE001 - raised by `results`
            self._error = error

    def results(self) -> list[TokenOutput]:
        """One for every row of its batch. Raises what computing it raised."""
        self.wait()
        if self._results is None:
            raise self._error or AssertionError("a step that has not begun")
        return self._results


def is_stale(item: StepItem) -> bool:
    """True if the sequence ended, or lost its request or KV, after planning: its result is to be discarded."""
    sequence = item.sequence
    return item.state.place is QueueState.GONE or sequence.finish is not None or sequence.computed != item.start
