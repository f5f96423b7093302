"""A runner without a model: writes every token's hash, reads the whole context back, chooses the next token."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tandem.core.clock import Clock, MonotonicClock
from tandem.core.config import SimSection
from tandem.core.kv_layout import KVLayout
from tandem.core.prefill_queue import attended
from tandem.engine.output_matcher import OutputMatcher, timely_masks
from tandem.engine.request import TokenOutput
from tandem.engine.runner_protocol import Ahead, LayersStored, SampleRow, SeqSlice, StepBatch
from tandem.engine.sim.arithmetic import chain, choose, combine, prompt_logprob, report_logprob
from tandem.engine.sim.digest_all_gather import gather
from tandem.engine.sim.pool import SimPool

if TYPE_CHECKING:
    from tandem.engine.parallel import TensorGroup


class SimRunner:
    """One rank of a simulated model. Implements `Runner`; imports torch only with a `group` of several ranks.

    `num_blocks` has one number a KV group; `layer_group` is how many layers pass between two calls of `on_layers`,
    0 = all. `timing` is how long steps take at least, for prompts spread evenly over the layers. The ranks of a group
    are driven with the same steps in the same order; followers pass no `rows` and get no tokens.
    """

    def __init__(
        self, layout: KVLayout, num_blocks: Sequence[int], *, vocab_size: int, max_model_len: int,
        eos_token_ids: Sequence[int] = (), layer_group: int = 0, timing: SimSection | None = None,
        group: TensorGroup | None = None, clock: Clock | None = None,
    ) -> None:  # fmt: skip
        self.layout, self.max_model_len, self.group = layout, max_model_len, group
        self.vocab_size, self.eos_token_ids = vocab_size, tuple(eos_token_ids)
        self._timing, self._clock = timing or SimSection(), clock or MonotonicClock()
        rank = group.rank if group is not None else 0
        self.pools = tuple(
            SimPool(spec, count, tp=layout.tp, rank=rank)
            for spec, count in zip(layout.groups, num_blocks, strict=True)
        )  # fmt: skip
        self.num_blocks = tuple(num_blocks)
        self._layers = sum(len(spec.layers) for spec in layout.groups)
        self._layer_group = layer_group or self._layers
        self._pause = threading.Event()  # never set: waiting for it lets other threads run

    @property
    def ahead(self) -> Ahead | None:
        """None: its steps are over when they return."""
        return None

    def step(
        self, batch: StepBatch, rows: Sequence[SampleRow], on_layers: LayersStored | None = None
    ) -> list[TokenOutput]:
        """Write, read back, wait, choose. Raises ValueError if the batch contradicts itself or leaves the context.

        A rank that fails after that aborts its group, for the others wait for its digests.
        """
        started_s = self._clock.now_s()
        self._check(batch)
        try:
            digests = self._run(batch, started_s, on_layers)
        except BaseException as error:
            if self.group is not None:
                self.group.abort(f"rank {self.group.rank} failed in a step: {error}")
            raise
        masks = iter(timely_masks([(matcher, row.drafts) for row in rows if (matcher := _matcher(row)) is not None]))
        return [
            self._sample(digests[row.row], row, None if _matcher(row) is None else next(masks)) for row in rows
        ]  # fmt: skip

    def copy_blocks(self, group: int, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks (source, target) inside the pool of `group`."""
        for source, target in pairs:
            self.pools[group].copy(source, target)

    def pool_bytes(self, group: int) -> memoryview:
        """The pool of `group` on this rank as writable bytes, without a copy."""
        return self.pools[group].data

    def _run(self, batch: StepBatch, started_s: float, on_layers: LayersStored | None) -> list[int]:
        """The digest of every logit row, over all ranks; empty on followers."""
        prefill_s, decode_s = durations(self._timing, batch.sequences)
        hashes = self._chain(batch)
        for first in range(0, self._layers, self._layer_group):
            last = min(first + self._layer_group, self._layers)
            for sequence, own in zip(batch.sequences, hashes, strict=True):
                self._store(sequence, own, first, last)
            self._wait_until(started_s + prefill_s * last / self._layers)
            if on_layers is not None:
                on_layers(first, last)
        digests = gather(self._digests(batch), self.group) if batch.logit_rows else []
        self._wait_until(started_s + prefill_s + decode_s)  # after reading, which is not to make the step longer
        return digests

    def _check(self, batch: StepBatch) -> None:
        tokens = sum(sequence.query_tokens for sequence in batch.sequences)
        if not tokens or len(batch.token_ids) != tokens or len(batch.positions) != tokens:
            raise ValueError(f"{len(batch.token_ids)} tokens, {len(batch.positions)} positions, {tokens} in sequences")
        if not 0 <= min(batch.positions) <= max(batch.positions) < self.max_model_len:
            raise ValueError(f"positions must be from 0 to {self.max_model_len - 1}, got {max(batch.positions)}")
        if not 0 <= min(batch.token_ids) <= max(batch.token_ids) < self.vocab_size:
            raise ValueError(f"token ids must be from 0 to {self.vocab_size - 1}")
        for sequence in batch.sequences:
            for spec, table in zip(self.layout.groups, sequence.block_tables, strict=True):
                if len(table) < spec.blocks_for(sequence.context_tokens):
                    raise ValueError(f"{sequence.context_tokens} tokens do not fit the table's {len(table)} blocks")

    def _chain(self, batch: StepBatch) -> list[list[int]]:
        """The hashes of every sequence's new tokens, behind the one in the slot before them. Drafts are sequences that
        follow each other in a step."""
        hashes, row, size = [], 0, self.pools[0].spec.block_tokens
        written: dict[tuple[int, int], int] = {}
        for sequence in batch.sequences:
            start = sequence.context_tokens - sequence.query_tokens
            if batch.positions[row] != start:
                raise ValueError(f"a sequence goes on at position {batch.positions[row]}, not {start}")
            table = sequence.block_tables[0]
            before = written.get((table[(start - 1) // size], (start - 1) % size)) if start else None
            if before is None:
                before = self.pools[0].hash_at(table, start - 1)
            hashes.append(chain(before, batch.token_ids[row : row + sequence.query_tokens]))
            end = sequence.context_tokens - 1
            written[table[end // size], end % size] = hashes[-1][-1]
            row += sequence.query_tokens
        return hashes

    def _store(self, sequence: SeqSlice, hashes: list[int], first: int, last: int) -> None:
        """Write the slots of model layers [first, last), whichever groups they are in."""
        start = sequence.context_tokens - sequence.query_tokens
        for pool, table in zip(self.pools, sequence.block_tables, strict=True):
            own = [index for index, layer in enumerate(pool.spec.layers) if first <= layer < last]
            if own:
                pool.write(table, start, hashes, range(own[0], own[-1] + 1))

    def _digests(self, batch: StepBatch) -> list[int]:
        """This rank's digest of the context of every logit row."""
        of_row = [sequence for sequence in batch.sequences for _ in range(sequence.query_tokens)]
        return [
            combine(
                pool.digest(table, batch.positions[row] + 1)
                for pool, table in zip(self.pools, of_row[row].block_tables, strict=True)
            )
            for row in batch.logit_rows
        ]

    def _sample(self, digest: int, row: SampleRow, mask: bytes | None) -> TokenOutput:
        sampling, params = row.sampling, row.sampling.params
        if row.token is not None:
            return TokenOutput(row.token, prompt_logprob(digest, row.token, params, self.vocab_size))
        if (forced := sampling.forced) is not None:
            return TokenOutput(forced, report_logprob(forced, params, self.vocab_size))
        token = choose(
            digest, params, sampling.choice, row.index, vocab_size=self.vocab_size, eos_token_ids=self.eos_token_ids,
            banned=sampling.banned(row.index, self.vocab_size) if sampling.has_mask else (),
            mask=mask,
        )  # fmt: skip
        return TokenOutput(token, report_logprob(token, params, self.vocab_size))

    def _wait_until(self, when_s: float) -> None:
        while (left_s := when_s - self._clock.now_s()) > 0:
            self._pause.wait(left_s)


def _matcher(row: SampleRow) -> OutputMatcher | None:
    """Grammar by which a token of the row is to be chosen."""
    return None if row.token is not None or row.sampling.forced is not None else row.sampling.matcher


def durations(timing: SimSection, sequences: Sequence[SeqSlice]) -> tuple[float, float]:
    """Seconds for the chunks of a step, and for its decodes (sequences of one token)."""
    chunks = [one for one in sequences if one.query_tokens > 1]
    decodes = [one for one in sequences if one.query_tokens == 1]
    prefill_s = decode_s = 0.0
    if chunks:
        tokens = sum(one.query_tokens for one in chunks)
        pairs = sum(attended(one.context_tokens - one.query_tokens, one.context_tokens) for one in chunks)
        prefill_s = timing.prefill_step_s + timing.prefill_context_s * pairs
        prefill_s += tokens / timing.prefill_tokens_per_s if timing.prefill_tokens_per_s else 0.0
    if decodes:
        context = sum(one.context_tokens for one in decodes)
        decode_s = timing.decode_step_s + timing.decode_sequence_s * len(decodes)
        decode_s += timing.decode_context_s * context
    return prefill_s, decode_s
