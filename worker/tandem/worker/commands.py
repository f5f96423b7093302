"""Commands of rank 0 to the other ranks of its worker, as bytes: steps, block copies and transfer calls, in one order.

    0      1          2              4
    ┌──────┬──────────┬──────────────┬────────┐
    │ kind │ has_hook │ after_layers │ body … │      little-endian; a step's numbers are i32, other bodies msgpack
    └──────┴──────────┴──────────────┴────────┘

`after_layers`: how many layers of the step in progress rank 0 had stored when it gave the command. A follower that is
still behind obeys when it has stored as many, so that it never pushes what it has not computed. Between steps it is
AFTER_STEP: a follower may still be in the middle of the step that rank 0 has ended.

Only values; `followers` sends them, `follower` obeys.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, get_args

import msgspec

from tandem.core.ids import BlockId, GroupId, Incarnation, TransferId
from tandem.engine.runner_protocol import SeqSlice, StepBatch
from tandem.kvtransfer.ticket import Ticket

_HEAD = struct.Struct("<B?H")
_STEP = struct.Struct("<IIII")
AFTER_STEP = 0xFFFF
"""`after_layers` of commands between steps; no model has so many layers."""
_MORE, _LAST = b"\xff", b"\xfe"
"""In place of a kind: a part of a long command, with more to follow, or the last one."""


class Step(msgspec.Struct, frozen=True):
    """Run one step. `has_hook`: rank 0 gives commands while layers are stored."""

    batch: StepBatch
    has_hook: bool


class CopyBlocks(msgspec.Struct, frozen=True):
    """Copy whole blocks (source, target) inside the pool of `group`."""

    group: int
    pairs: list[tuple[int, int]]


class Expect(msgspec.Struct, frozen=True):
    """Receiver: accept frames of this ticket."""

    ticket: Ticket


class Admit(msgspec.Struct, frozen=True):
    """Receiver: the request took over the verified blocks."""

    transfer: TransferId


class CancelReceiving(msgspec.Struct, frozen=True):
    """Receiver: fence."""

    transfer: TransferId
    reason: str


class Revoke(msgspec.Struct, frozen=True):
    """Receiver: fence, quietly if no byte came."""

    transfer: TransferId


class Open(msgspec.Struct, frozen=True):
    """Sender: begin a transfer."""

    ticket: Ticket


class PushCommand(msgspec.Struct, frozen=True):
    """Sender: queue blocks; see `TransferSender.push`."""

    transfer: TransferId
    group: GroupId
    src_blocks: Sequence[BlockId]
    dst_blocks: Sequence[BlockId]
    layers: range
    offset_tokens: int = 0
    tokens: int | None = None


class Finish(msgspec.Struct, frozen=True):
    """Sender: nothing more will be pushed."""

    transfer: TransferId


class CancelSending(msgspec.Struct, frozen=True):
    """Sender: stop reading the source."""

    transfer: TransferId


class SetIncarnation(msgspec.Struct, frozen=True):
    """Both ends: the worker's incarnation from now on."""

    incarnation: Incarnation


class Stop(msgspec.Struct, frozen=True):
    """End the process."""


Command = (
    Step
    | CopyBlocks
    | Expect
    | Admit
    | CancelReceiving
    | Revoke
    | Open
    | PushCommand
    | Finish
    | CancelSending
    | SetIncarnation
    | Stop
)
_KINDS = {command: kind for kind, command in enumerate(get_args(Command))}
_ENCODER = msgspec.msgpack.Encoder(enc_hook=lambda layers: (layers.start, layers.stop))
_DECODERS: list[msgspec.msgpack.Decoder[Any]] = [
    msgspec.msgpack.Decoder(command, dec_hook=lambda _, layers: range(*layers)) for command in _KINDS
]


def encode(command: Command, after_layers: int = AFTER_STEP) -> bytes:
    """The command as one message. Raises struct.error or OverflowError for a value that no field holds."""
    kind = _KINDS[type(command)]
    if isinstance(command, Step):
        return _HEAD.pack(kind, command.has_hook, after_layers) + _pack(command.batch)
    return _HEAD.pack(kind, False, after_layers) + _ENCODER.encode(command)


def decode(data: bytes) -> tuple[int, Command]:
    """(after_layers, command). Raises DecodeError, struct.error or IndexError for what `encode` did not make."""
    kind, has_hook, after_layers = _HEAD.unpack_from(data)
    body = memoryview(data)[_HEAD.size :]
    command = Step(_unpack(body), has_hook) if kind == _KINDS[Step] else _DECODERS[kind].decode(body)
    return after_layers, command


def split(data: bytes, limit: int) -> Iterator[bytes]:
    """An encoded command as messages of `limit` bytes at most: many long block tables fit no ring at once."""
    if len(data) <= limit:
        yield data
        return
    for first in range(0, len(data), limit - 1):
        last = first + limit - 1
        yield (_MORE if last < len(data) else _LAST) + data[first:last]


class Joiner:
    """Joins the parts that `split` made."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def add(self, message: bytes) -> bytes | None:
        """Return the whole command with its last message, None before."""
        mark = message[:1]
        if mark not in (_MORE, _LAST):
            return message
        self._pieces.append(message[1:])
        if mark == _MORE:
            return None
        whole = b"".join(self._pieces)
        self._pieces.clear()
        return whole


# Steps are packed by hand, with whole block tables: msgpack would give a follower lists, which take several times as
# long as arrays to decode and to put into a tensor (bench/step_messages).


def _pack(batch: StepBatch) -> bytes:
    """Counts, then one run of i32: tokens, positions, logit rows, (query, context) and table sizes, tables."""
    groups = len(batch.sequences[0].block_tables) if batch.sequences else 0
    tables = [table for sequence in batch.sequences for table in sequence.block_tables]
    numbers = array("i")
    numbers.fromlist(batch.token_ids)
    numbers.fromlist(batch.positions)
    numbers.fromlist(batch.logit_rows)
    numbers.fromlist([n for s in batch.sequences for n in (s.query_tokens, s.context_tokens)])
    numbers.fromlist([len(table) for table in tables])
    for table in tables:
        if isinstance(table, list):
            numbers.fromlist(table)
        else:
            numbers.extend(table)
    head = _STEP.pack(len(batch.token_ids), len(batch.logit_rows), len(batch.sequences), groups)
    return head + numbers.tobytes()


def _unpack(body: memoryview) -> StepBatch:
    """Block tables come as arrays: cheap to cut, and to put into a tensor."""
    tokens, rows, sequences, groups = _STEP.unpack_from(body)
    numbers = array("i")
    numbers.frombytes(body[_STEP.size :])
    at = 2 * tokens + rows
    shares = numbers[at : at + 2 * sequences].tolist()
    sizes_at = at + 2 * sequences
    place = sizes_at + sequences * groups
    tables: list[array[int]] = []
    for size in numbers[sizes_at:place]:
        tables.append(numbers[place : place + size])
        place += size
    slices = [
        SeqSlice(shares[2 * i], shares[2 * i + 1], tuple(tables[i * groups : (i + 1) * groups]))
        for i in range(sequences)
    ]
    return StepBatch(
        numbers[:tokens].tolist(), numbers[tokens : 2 * tokens].tolist(), slices, numbers[2 * tokens : at].tolist()
    )
