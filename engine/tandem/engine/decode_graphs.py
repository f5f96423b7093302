"""Decode steps of a few sizes in static memory, each captured as one CUDA graph: launched by one call.

Owns the static inputs and outputs of those steps. It does not know the model: `compute` is a whole step. Without a
device the same buffers and sizes work without capture. Not thread-safe: the step loop owns it.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable
from itertools import chain, repeat

import torch
from torch import Tensor

from tandem.core.logs import event
from tandem.engine.runner_protocol import StepBatch
from tandem.engine.step_tensors import SequenceTensors, StepTensors, token_slots

_log = logging.getLogger(__name__)
_FIELDS = 3
"""Numbers of a sequence beside its block tables: token, position, tokens of context."""
_GRAPH_BYTES = 8 << 20
"""Driver memory for one graph of a few hundred kernels: an estimate, not measured."""
_LIBRARY_BYTES = 32 << 20
"""The workspace of the matrix library, which has one of its own under capture."""


def graph_sizes(sequences: int) -> tuple[int, ...]:
    """Sequences of the captured steps: powers of two, and the most there can be. Rising."""
    powers = [1 << power for power in range(sequences.bit_length()) if 1 << power < sequences]
    return (*powers, sequences)


def graph_bytes(sizes: tuple[int, ...], activation_bytes: int, vocab: int, number_bytes: int, blocks: int) -> int:
    """An upper bound of the memory that graphs of `sizes` hold, by arithmetic.

    All share one pool: the largest step's activations (`activation_bytes` a sequence), and each its own logits.
    `blocks` are those of the block tables of one sequence, of all groups.
    """
    if not sizes:
        return 0
    logits = sum(sizes) * vocab * (number_bytes + 4)
    inputs = 2 * sizes[-1] * (_FIELDS + blocks) * 4
    return sizes[-1] * activation_bytes + logits + inputs + len(sizes) * _GRAPH_BYTES + _LIBRARY_BYTES


class DecodeGraphs:
    """`compute` maps a StepTensors of decodes alone to logits [sequences, vocab], without asking the host anything.

    `table_blocks` is the most blocks of one sequence, one number a KV group, and `block_tokens` their tokens. `run`
    uses what `capture` captured, and calls `compute` on the same buffers where nothing was.
    """

    def __init__(
        self, compute: Callable[[StepTensors], Tensor], sizes: tuple[int, ...], table_blocks: tuple[int, ...],
        block_tokens: tuple[int, ...], device: torch.device,
    ) -> None:  # fmt: skip
        self.sizes = sizes
        self._compute, self._block_tokens, self._device = compute, block_tokens, device
        most = sizes[-1]
        self._fields = torch.zeros((_FIELDS, most), dtype=torch.int32, device=device)
        self._tables = tuple(torch.zeros((most, blocks), dtype=torch.int32, device=device) for blocks in table_blocks)
        self._starts = torch.arange(most + 1, dtype=torch.int32, device=device)
        self._upload = _Upload(most * (_FIELDS + sum(table_blocks)), device)
        self._captured: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def takes(self, batch: StepBatch) -> bool:
        """True if `batch` is few enough sequences, one token each, with all logits requested in order."""
        count = len(batch.sequences)
        return (
            0 < count <= self.sizes[-1]
            and len(batch.token_ids) == len(batch.positions) == count
            and all(sequence.query_tokens == 1 for sequence in batch.sequences)
            and batch.logit_rows == list(range(count))
        )

    def run(self, batch: StepBatch, tokens: Tensor | None = None) -> Tensor:
        """Logits fp32 [sequences, vocab] of a batch that `takes` takes; overwritten by the next run.

        `tokens` [sequences], on the device, are its inputs in place of `batch.token_ids`.

        Raises ValueError if a block table is too short for its context. Does not wait for the device.
        """
        count = len(batch.sequences)
        size = next(size for size in self.sizes if size >= count)
        self._fill(batch, size)
        if tokens is not None:
            self._fields[0, :count].copy_(tokens)
        if size not in self._captured:
            return self._compute(self._step(size))[:count]
        graph, logits = self._captured[size]
        graph.replay()
        return logits[:count]

    def capture(self) -> bool:
        """Capture every size, the largest first: the others reuse its memory. CUDA only.

        Padding alone is computed, which writes no KV. False where a step cannot be captured; then all of them are
        launched kernel by kernel, and the reason is logged.
        """
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        try:
            for size in reversed(self.sizes):
                stream.wait_stream(torch.cuda.current_stream(self._device))
                with torch.cuda.stream(
                    stream
                ):  # compiles kernels and wakes libraries, neither of which can be captured
                    self._compute(self._step(size))
                stream.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, stream=stream):
                    logits = self._compute(self._step(size))
                self._captured[size] = (graph, logits)
        except RuntimeError as error:
            self._captured.clear()
            why = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            event(_log, "decode steps are not captured as CUDA graphs", logging.WARNING, why=why)
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # of the other stream, which computes nothing more
        return bool(self._captured)

    def _step(self, size: int) -> StepTensors:
        """The step of the first `size` rows of the buffers; what is computed here is part of the graph."""
        token_ids, positions, lens = (field[:size] for field in self._fields)
        tables, positions = tuple(table[:size] for table in self._tables), positions.long()
        is_padding = lens == 0
        slots = tuple(
            token_slots(table, None, positions, tokens).masked_fill_(is_padding, -1)
            for table, tokens in zip(tables, self._block_tokens, strict=True)
        )
        decodes = SequenceTensors(
            start=0, end=size, block_tables=tables, context_lens=lens, cu_seqlens=self._starts[: size + 1]
        )
        return StepTensors(
            token_ids=token_ids.long(), positions=positions, rows=None, slots=slots, decodes=decodes, chunks=None
        )

    def _fill(self, batch: StepBatch, size: int) -> None:
        """Put `batch` into the first `size` rows, padded with token 0 at position 0 of sequences without context.

        What older steps left in tables, past a context or in padding rows, is never read.
        """
        count = len(batch.sequences)
        lens = [sequence.context_tokens for sequence in batch.sequences]
        padding = tuple(repeat(0, size - count))
        numbers = array("i", chain(batch.token_ids, padding, batch.positions, padding, lens, padding))
        widths = []
        for group, tokens in enumerate(self._block_tokens):
            needed = [-(-length // tokens) for length in lens]
            widths.append(max(needed))
            for sequence, blocks in zip(batch.sequences, needed, strict=True):
                table = sequence.block_tables[group][:blocks]
                if len(table) != blocks:
                    raise ValueError(
                        f"{sequence.context_tokens} tokens need {blocks} blocks, the table has {len(table)}"
                    )
                numbers.extend(table)
                numbers.extend(repeat(0, widths[-1] - blocks))
        staged = self._upload(numbers)
        end = _FIELDS * size
        self._fields[:, :size].copy_(staged[:end].view(_FIELDS, size))
        for held, width in zip(self._tables, widths, strict=True):
            start, end = end, end + count * width
            held[:count, :width].copy_(staged[start:end].view(count, width))


class _Upload:
    """Uploads numbers of a step in one copy without waiting for it; the returned tensors hold until the next one."""

    def __init__(self, most: int, device: torch.device) -> None:
        self._pinned: Tensor | None = None
        if device.type == "cuda":
            self._pinned = torch.empty(most, dtype=torch.int32, pin_memory=True)
            self._staged = torch.empty(most, dtype=torch.int32, device=device)
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def __call__(self, numbers: array[int]) -> Tensor:
        host = torch.frombuffer(numbers, dtype=torch.int32)
        if self._pinned is None:
            return host
        self._done.synchronize()  # of the copy before: it ended before its step did
        pinned, staged = self._pinned[: len(host)], self._staged[: len(host)]
        pinned.copy_(host)
        staged.copy_(pinned, non_blocking=True)
        self._done.record()
        return staged
