"""One step as input of a runner: plain lists. Imports no torch, so that a runner without it can be driven too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


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
