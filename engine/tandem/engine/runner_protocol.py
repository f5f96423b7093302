"""Interface of the engine to the executor of its steps: the model runner, or arithmetic in tests and simulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tandem.core.kv_layout import KVLayout
from tandem.engine.request import TokenOutput
from tandem.engine.sampling_state import ChoiceSampling

LayersStored = Callable[[int, int], None]
"""on_layers(first, last): the step's KV of layers [first, last) is in the pool (on CUDA: queued on the stream)."""


@dataclass(slots=True)
class SeqSlice:
    """One sequence's share of a step. `context_tokens` counts stored tokens including this step's `query_tokens`.

    `block_tables` has one sequence of block ids a KV group; entry i holds positions i · block_tokens and up. The lists
    are the scheduler's and are read during the step only.
    """

    query_tokens: int
    context_tokens: int
    block_tables: tuple[Sequence[int], ...]


@dataclass(slots=True)
class StepBatch:
    """Tokens of all sequences one after the other: decode sequences (one query token) first, then prefill chunks.

    A draft token is a decode sequence of its own, with the table of the one that it continues: in every layer the KV of
    all tokens is stored before any of them attends.

    `positions[i]` is the position of `token_ids[i]` in its sequence; `logit_rows` are indices into `token_ids`, in
    the requested order of their logits.
    """

    token_ids: list[int]
    positions: list[int]
    sequences: list[SeqSlice]
    logit_rows: list[int] = field(default_factory=list)

    def counts(self) -> dict[str, int]:
        """Counts of the batch, for logs. Any thread."""
        decodes = sum(sequence.query_tokens == 1 for sequence in self.sequences)
        return {
            "decodes": decodes,
            "chunks": len(self.sequences) - decodes,
            "tokens": len(self.token_ids),
            "context_tokens": sum(sequence.context_tokens for sequence in self.sequences),
            "logit_rows": len(self.logit_rows),
        }


@dataclass(slots=True)
class SampleRow:
    """One token to choose: from logits row `row`, for output `index` of a choice.

    With a `token` none is chosen: that one, of the prompt, is reported as if it had been. `drafts`: output tokens
    before it that `sampling` has not counted, because it is not known yet if they will be chosen.
    """

    row: int
    index: int
    sampling: ChoiceSampling
    token: int | None = None
    drafts: tuple[int, ...] = ()


class Begun(Protocol):
    """A step that the device computes."""

    def results(self) -> list[TokenOutput]:
        """Return or raise the result of `Runner.step`, once the device has it. Call it once."""


class Ahead(Protocol):
    """Begins decode steps one behind the other, each before the tokens of the one before it are known."""

    def begin(
        self, batch: StepBatch, rows: Sequence[SampleRow], before: Begun | None = None, chosen: Sequence[int] = ()
    ) -> Begun | None:
        """Begin a step, behind everything begun so far; None, with nothing begun, where that takes waiting.

        With `before` its inputs are that step's choices: token i for its row `chosen[i]`, instead of `batch.token_ids`.
        Block tables are read during the call only, but the step reads and writes their blocks until its results are
        there.
        """


class Runner(Protocol):
    """Executes steps on one tensor-parallel group. Called from the step loop's thread only.

    An exception from `step` or `copy_blocks` fails every request of that step; WorkerLostError ends the engine.
    """

    layout: KVLayout
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    num_blocks: tuple[int, ...]
    """Blocks of each KV group's pool."""

    @property
    def ahead(self) -> Ahead | None:
        """Interface to begin steps without waiting for them; None where the runner cannot."""

    def step(
        self, batch: StepBatch, rows: Sequence[SampleRow], on_layers: LayersStored | None = None
    ) -> list[TokenOutput]:
        """Compute the batch and choose a token for every row; `row.row` indexes `batch.logit_rows`.

        Calls `on_layers(first, last)` as KV layers are written. The block tables in `batch` belong to the scheduler and
        are valid during the call only.
        """

    def copy_blocks(self, group: int, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks (source, target) of a group before the next step; no target is a source."""
