"""Commands of rank 0 to the other ranks of its worker, as bytes: steps, block copies and transfer calls, in one order.

    0      1        2                4
    ┌──────┬────────┬────────────────┬──────────────┐
    │ kind │ flags  │ after_layers   │ body …       │      little-endian; block ids and tokens are i32, in a push u32
    └──────┴────────┴────────────────┴──────────────┘

`after_layers`: how many layers of the step in progress rank 0 had stored when it gave the command. A follower that is
still behind obeys when it has stored as many, so that it never pushes what it has not computed. Between steps it is
AFTER_STEP: a follower may still be in the middle of the step that rank 0 has ended.

Only values; `followers` sends them, `follower` obeys.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from tandem.core.ids import BlockId, GroupId, Incarnation, TransferId, WorkerId
from tandem.core.kv_compatibility import KVProfile
from tandem.engine.step_batch import SeqSlice, StepBatch
from tandem.kvtransfer.ticket import Ticket
from tandem.kvtransfer.wire import profile_to_wire
from tandem.rpc.v1 import worker_pb2 as w
from tandem.workercore.proto_convert import ticket_from_wire, ticket_to_wire

_HEAD = struct.Struct("<BBH")
_STEP = struct.Struct("<IIII")
_COPY = struct.Struct("<I")
_PUSH = struct.Struct("<QIIIIIIi")
_TRANSFER = struct.Struct("<Q")
_NAME = struct.Struct("<HH")
_ALL = -1
_HAS_HOOK = 1
AFTER_STEP = 0xFFFF
"""`after_layers` of commands between steps; no model has so many layers."""
_MORE, _LAST = b"\xff", b"\xfe"
"""In place of a kind: a part of a long command, with more to follow, or the last one."""


@dataclass(frozen=True, slots=True)
class Step:
    """Run one step. `has_hook`: rank 0 gives commands while layers are stored."""

    batch: StepBatch
    has_hook: bool


@dataclass(frozen=True, slots=True)
class CopyBlocks:
    """Copy whole blocks (source, target) inside the pool of `group`."""

    group: int
    pairs: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Expect:
    """Receiver: accept frames of this ticket."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Admit:
    """Receiver: the request took over the verified blocks."""

    transfer: TransferId


@dataclass(frozen=True, slots=True)
class CancelReceiving:
    """Receiver: fence."""

    transfer: TransferId
    reason: str


@dataclass(frozen=True, slots=True)
class Revoke:
    """Receiver: fence, quietly if no byte came."""

    transfer: TransferId


@dataclass(frozen=True, slots=True)
class Open:
    """Sender: begin a transfer."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class PushCommand:
    """Sender: queue blocks; see `TransferSender.push`."""

    transfer: TransferId
    group: GroupId
    src_blocks: Sequence[BlockId]
    dst_blocks: Sequence[BlockId]
    layers: range
    offset_tokens: int = 0
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Finish:
    """Sender: nothing more will be pushed."""

    transfer: TransferId


@dataclass(frozen=True, slots=True)
class CancelSending:
    """Sender: stop reading the source."""

    transfer: TransferId


@dataclass(frozen=True, slots=True)
class SetIncarnation:
    """Both ends: the worker's incarnation from now on."""

    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class Stop:
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


def encode(command: Command, after_layers: int = AFTER_STEP) -> bytes:
    """The command as one message. Raises struct.error or OverflowError for a value that no field holds."""
    kind, body = _ENCODERS[type(command)]
    flags = _HAS_HOOK if isinstance(command, Step) and command.has_hook else 0
    return _HEAD.pack(kind, flags, after_layers) + body(command)


def decode(data: bytes) -> tuple[int, Command]:
    """(after_layers, command). Raises ValueError, struct.error or KeyError for what `encode` did not make."""
    kind, flags, after_layers = _HEAD.unpack_from(data)
    return after_layers, _DECODERS[kind](memoryview(data)[_HEAD.size :], flags)


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


# ---- steps: whole block tables, because that is fast enough (bench/step_messages) ----------------------------------


def _encode_step(command: Step) -> bytes:
    """Counts, then one run of i32: tokens, positions, logit rows, (query, context) and table sizes, tables."""
    batch = command.batch
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


def _decode_step(body: memoryview, flags: int) -> Step:
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
    batch = StepBatch(
        numbers[:tokens].tolist(), numbers[tokens : 2 * tokens].tolist(), slices, numbers[2 * tokens : at].tolist()
    )
    return Step(batch, bool(flags & _HAS_HOOK))


def _encode_copy(command: CopyBlocks) -> bytes:
    return _COPY.pack(command.group) + array("i", chain.from_iterable(command.pairs)).tobytes()


def _decode_copy(body: memoryview, _flags: int) -> CopyBlocks:
    ids = _numbers(body[_COPY.size :])
    return CopyBlocks(_COPY.unpack_from(body)[0], list(zip(ids[::2], ids[1::2], strict=True)))


# ---- transfers -----------------------------------------------------------------------------------------------------


def _encode_push(command: PushCommand) -> bytes:
    """Block ids as u32: a peer chose the destinations, and no value that fits a message may end this worker."""
    head = _PUSH.pack(
        command.transfer, command.group, len(command.src_blocks), len(command.dst_blocks),
        command.layers.start, command.layers.stop, command.offset_tokens,
        _ALL if command.tokens is None else command.tokens,
    )  # fmt: skip
    return head + array("I", command.src_blocks).tobytes() + array("I", command.dst_blocks).tobytes()


def _decode_push(body: memoryview, _flags: int) -> PushCommand:
    transfer, group, sources, dests, first, last, offset, tokens = _PUSH.unpack_from(body)
    ids = [BlockId(n) for n in _numbers(body[_PUSH.size :], "I")]
    if len(ids) != sources + dests:
        raise ValueError(f"{len(ids)} blocks in a push of {sources} and {dests}")
    return PushCommand(
        TransferId(transfer), GroupId(group), ids[:sources], ids[sources:], range(first, last), offset,
        None if tokens == _ALL else tokens,
    )  # fmt: skip


def _encode_ticket(command: Expect | Open) -> bytes:
    """The two names, then the ticket in its form between workers. Rare, so protobuf will do."""
    ticket = command.ticket
    profile = profile_to_wire(KVProfile(fingerprint="", identity=(), layout=ticket.layout))
    message = ticket_to_wire(ticket, profile)
    sender, receiver = ticket.sender.encode(), ticket.receiver.encode()
    return _NAME.pack(len(sender), len(receiver)) + sender + receiver + message.SerializeToString()


def _decode_ticket(body: memoryview) -> Ticket:
    sender, receiver = _NAME.unpack_from(body)
    names = bytes(body[_NAME.size : _NAME.size + sender + receiver])
    message = w.Ticket.FromString(bytes(body[_NAME.size + len(names) :]))
    return ticket_from_wire(message, WorkerId(names[:sender].decode()), WorkerId(names[sender:].decode()))


def _encode_id(command: Admit | Revoke | Finish | CancelSending) -> bytes:
    return _TRANSFER.pack(command.transfer)


def _decode_id(body: memoryview) -> TransferId:
    return TransferId(_TRANSFER.unpack(body)[0])


def _decode_cancel(body: memoryview, _flags: int) -> CancelReceiving:
    return CancelReceiving(_decode_id(body[: _TRANSFER.size]), bytes(body[_TRANSFER.size :]).decode())


def _numbers(body: memoryview, code: str = "i") -> list[int]:
    numbers = array(code)
    numbers.frombytes(body)
    return numbers.tolist()


_ENCODERS: dict[type, tuple[int, Callable[..., bytes]]] = {
    Step: (1, _encode_step),
    CopyBlocks: (2, _encode_copy),
    Expect: (3, _encode_ticket),
    Admit: (4, _encode_id),
    CancelReceiving: (5, lambda c: _TRANSFER.pack(c.transfer) + c.reason.encode()),
    Open: (6, _encode_ticket),
    PushCommand: (7, _encode_push),
    Finish: (8, _encode_id),
    CancelSending: (9, _encode_id),
    SetIncarnation: (10, lambda c: _TRANSFER.pack(c.incarnation)),
    Stop: (11, lambda _: b""),
    Revoke: (12, _encode_id),
}
_DECODERS: dict[int, Callable[[memoryview, int], Command]] = {
    1: _decode_step,
    2: _decode_copy,
    3: lambda body, _: Expect(_decode_ticket(body)),
    4: lambda body, _: Admit(_decode_id(body)),
    5: _decode_cancel,
    6: lambda body, _: Open(_decode_ticket(body)),
    7: _decode_push,
    8: lambda body, _: Finish(_decode_id(body)),
    9: lambda body, _: CancelSending(_decode_id(body)),
    10: lambda body, _: SetIncarnation(Incarnation(_TRANSFER.unpack(body)[0])),
    11: lambda _body, _flags: Stop(),
    12: lambda body, _: Revoke(_decode_id(body)),
}
