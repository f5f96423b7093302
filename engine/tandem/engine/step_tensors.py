"""The index tensors that paged attention needs, built once a step from the lists of a `StepBatch`; asynchronous copies.

They do not wait for the device's work. On a CPU they are plain tensors.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.engine.runner_protocol import SeqSlice, StepBatch


@dataclass(frozen=True, slots=True)
class SequenceTensors:
    """Sequences that one attention call takes: rows [start, end) of the step's tokens.

    `block_tables`: int32 [n, blocks] a group, padded with 0 past the context; `context_lens`: int32 [n];
    `cu_seqlens`: int32 [n + 1], from 0.
    """

    start: int
    end: int
    block_tables: tuple[Tensor, ...]
    context_lens: Tensor
    cu_seqlens: Tensor


@dataclass(frozen=True, slots=True)
class StepTensors:
    """A StepBatch on the device. `rows` is None when the logits of all tokens are wanted, in order.

    `slots[group]`: int64 [T], block · block_tokens + offset of each token in that group's pool.
    """

    token_ids: Tensor
    positions: Tensor
    rows: Tensor | None
    slots: tuple[Tensor, ...]
    decodes: SequenceTensors | None
    chunks: SequenceTensors | None


def upload(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Upload `values` as a tensor [n] on `device`.

    From pinned memory, because other copies wait for the stream.
    """
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


class Download:
    """Copies of tensors on their way to the host, behind everything that is queued on the stream now."""

    def __init__(self, *tensors: Tensor) -> None:
        self._tensors = tensors
        self._done: torch.cuda.Event | None = None
        if tensors[0].device.type == "cuda":
            self._tensors = tuple(torch.empty_like(t, device="cpu", pin_memory=True) for t in tensors)
            for target, source in zip(self._tensors, tensors, strict=True):
                target.copy_(source, non_blocking=True)
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()

    def wait(self) -> tuple[Tensor, ...]:
        """Return the tensors on the host, once they are there. Raises an error of the device."""
        if self._done is not None:
            self._done.synchronize()
        return self._tensors


def build_step(
    batch: StepBatch, block_tokens: Sequence[int], device: torch.device, *, has_decode_kernel: bool = True
) -> StepTensors:
    """The tensors of `batch`; `block_tokens` has one entry a KV group.

    Without `has_decode_kernel` decode sequences are chunks of one token among the others. Raises ValueError when the
    lists of the batch contradict each other.
    """
    sequences = batch.sequences
    counts = [sequence.query_tokens for sequence in sequences]
    tokens = len(batch.token_ids)
    if sum(counts) != tokens or len(batch.positions) != tokens:
        raise ValueError(f"{tokens} tokens, {len(batch.positions)} positions, {sum(counts)} in sequences")
    if not tokens:
        raise ValueError("a step needs at least one token")
    decodes = next((place for place, count in enumerate(counts) if count != 1), len(counts))
    is_one_each = decodes == len(counts)
    if not has_decode_kernel:
        decodes = 0
    positions = _int64(batch.positions, device)
    tables = tuple(_padded_tables(sequences, group, size, device) for group, size in enumerate(block_tokens))
    rows = None if batch.logit_rows == list(range(tokens)) else _int64(batch.logit_rows, device)
    of_token = None
    if not is_one_each:
        of_token = torch.repeat_interleave(_int64(counts, device), output_size=tokens)
    if is_one_each and device.type == "cpu":
        slots = tuple(_slots_of_each(batch, group, size) for group, size in enumerate(block_tokens))
    else:
        slots = tuple(
            token_slots(table, of_token, positions, size) for table, size in zip(tables, block_tokens, strict=True)
        )
    return StepTensors(
        token_ids=_int64(batch.token_ids, device), positions=positions, rows=rows, slots=slots,
        decodes=_part(sequences, tables, 0, decodes, 0, device),
        chunks=_part(sequences, tables, decodes, len(counts), decodes, device),
    )  # fmt: skip


def _part(
    sequences: list[SeqSlice], tables: tuple[Tensor, ...], first: int, last: int, start: int, device: torch.device
) -> SequenceTensors | None:
    """Tensors of sequences [first, last); their tokens start at row `start`."""
    if first == last:
        return None
    ends = [0]
    for sequence in sequences[first:last]:
        ends.append(ends[-1] + sequence.query_tokens)
    return SequenceTensors(
        start=start, end=start + ends[-1],
        block_tables=tuple(table[first:last] for table in tables),
        context_lens=_int32([sequence.context_tokens for sequence in sequences[first:last]], device),
        cu_seqlens=_int32(ends, device),
    )  # fmt: skip


def _padded_tables(sequences: list[SeqSlice], group: int, block_tokens: int, device: torch.device) -> Tensor:
    """Block tables of one group, int32 [n, blocks]: cut to the longest context, padded with block 0."""
    needed = [-(-sequence.context_tokens // block_tokens) for sequence in sequences]
    width = max(needed)
    flat = array("i")
    for sequence, blocks in zip(sequences, needed, strict=True):
        table = sequence.block_tables[group][:blocks]
        if len(table) != blocks:
            raise ValueError(f"{sequence.context_tokens} tokens need {blocks} blocks, the table has {len(table)}")
        flat.extend(table)
        flat.extend([0] * (width - blocks))
    return _uploaded(flat, device).view(len(sequences), width)


def token_slots(table: Tensor, of_token: Tensor | None, positions: Tensor, block_tokens: int) -> Tensor:
    """The slot of every token; `of_token` is its sequence, None when there is one token a sequence."""
    places = torch.div(positions, block_tokens, rounding_mode="floor")
    blocks = table.gather(1, places[:, None])[:, 0] if of_token is None else table[of_token, places]
    return blocks.to(torch.int64).mul_(block_tokens).add_(positions - places * block_tokens)


def _slots_of_each(batch: StepBatch, group: int, block_tokens: int) -> Tensor:
    """As `token_slots` where each sequence has one token, without the eight small operations of tensors."""
    slots = []
    for sequence, position in zip(batch.sequences, batch.positions, strict=True):
        place, offset = divmod(position, block_tokens)
        slots.append(sequence.block_tables[group][place] * block_tokens + offset)
    return _int64(slots, torch.device("cpu"))


def _int64(values: list[int], device: torch.device) -> Tensor:
    return _uploaded(array("q", values), device)


def _int32(values: list[int], device: torch.device) -> Tensor:
    return _uploaded(array("i", values), device)


def _uploaded(numbers: array[int], device: torch.device) -> Tensor:
    """Upload an array of type "q" or "i", int64 or int32 [n]: torch reads a list three times as slowly."""
    dtype = torch.int64 if numbers.typecode == "q" else torch.int32
    if not numbers:
        return torch.empty(0, dtype=dtype, device=device)
    return torch.frombuffer(numbers, dtype=dtype).to(device, non_blocking=True)
