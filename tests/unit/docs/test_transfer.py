"""docs/transfer.md and frames.md against the code: promises, transports, bytes where the tables say they are."""

from __future__ import annotations

import re
import zlib
from pathlib import Path
from typing import Any

import pytest

from tandem.core.ids import Attempt, BlockId, GroupId, Incarnation, Rank, TransferId
from tandem.core.pairing import Codec
from tandem.kvtransfer import frame
from tandem.kvtransfer.frame import Checksum, Frame, FrameKind, Reply, ReplyKind
from tandem.kvtransfer.transports.registry import TRANSPORTS

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "docs" / "transfer.md").read_text()
FRAMES = (ROOT / "docs" / "frames.md").read_text()


def section(title: str) -> str:
    """From the heading to the next of its level or above."""
    mark = re.match(r"#+", title)
    assert mark is not None
    start = TEXT.index(f"\n{title}\n") + len(title) + 2
    following = re.search(rf"^#{{1,{len(mark[0])}}} ", TEXT[start:], re.MULTILINE)
    return TEXT[start : start + following.start()] if following else TEXT[start:]


def rows(text: str) -> list[list[str]]:
    """The cells of every table row, headings among them."""
    lines = [line for line in text.splitlines() if line.startswith("|") and not line.startswith("|---")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def byte_table(heading: str) -> list[tuple[int, str, str]]:
    """(offset, size, field) of the table whose last column is called `heading`."""
    start = FRAMES.index(f"| at | bytes | {heading} |\n")
    end = FRAMES.find("\n\n", start)
    return [(int(at), size, field) for at, size, field in rows(FRAMES[start:end])[1:]]


def test_every_promise_names_a_proof() -> None:
    promises = [row for row in rows(section("## What is promised, and what proves it"))[1:] if row[1]]
    assert len(promises) > 25
    for promise, _, proof in promises:
        named = re.findall(r"`(tests/[^`]+|make proof NAME=\w+)`", proof)
        assert named, promise
        assert any((ROOT / path).exists() for path in named), promise


def test_every_transport_has_a_row() -> None:
    tables = rows(section("## Transports"))
    about = [row[0].strip("`") for row in tables if len(row) == 6][1:]
    assert about == list(TRANSPORTS)
    for wide, text in ((4, section("## Transports")), (5, FRAMES)):
        named = {name for row in rows(text) if len(row) == wide for name in re.findall(r"`(\w+)`", row[0])}
        assert named == set(TRANSPORTS)
    for row in tables:
        name = row[0].strip("`")
        if len(row) == 6 and name in TRANSPORTS:
            assert ("by name" in row[1]) is not TRANSPORTS[name].is_automatic


FRAME = Frame(
    kind=FrameKind.DATA, transfer=TransferId(0x0102030405060708), attempt=Attempt(0x11121314),
    source_incarnation=Incarnation(0x2122232425262728), dest_incarnation=Incarnation(0x3132333435363738),
    source_rank=Rank(0x4142), source_ranks=0x4344, dest_rank=Rank(0x4546), group=GroupId(0x4748),
    layers=range(0x5152, 0x5354), heads=range(0x5556, 0x5758), blocks=(BlockId(7), BlockId(9)),
    payload_bytes=0x61626364, payload_crc=0x65666768, send_ns=0x7172737475767778, codec=Codec.FP8,
    checksum=Checksum.DEVICE,
)  # fmt: skip
IN_ORDER: list[Any] = [
    frame.MAGIC, frame.PROTOCOL_VERSION, FRAME.kind, FRAME.codec | FRAME.checksum << 4, FRAME.transfer, FRAME.attempt,
    FRAME.source_incarnation, FRAME.dest_incarnation, FRAME.source_rank, FRAME.source_ranks, FRAME.dest_rank,
    FRAME.group, FRAME.layers.start, FRAME.layers.stop, FRAME.heads.start, FRAME.heads.stop, len(FRAME.blocks),
    FRAME.payload_bytes, FRAME.payload_crc, FRAME.send_ns,
]  # fmt: skip


def test_the_header_lies_as_the_table_says() -> None:
    table = byte_table("field")
    data = frame.encode(FRAME)
    assert [at for at, _, _ in table] == [0, *(at + int(size) for at, size, _ in table[:-1])]
    assert table[-1][0] + int(table[-1][1]) == frame.HEADER_BYTES
    assert f"{frame.HEADER_BYTES} bytes of header" in FRAMES
    for (at, size, field), value in zip(table[:-1], IN_ORDER, strict=True):
        expected = value if isinstance(value, bytes) else int(value).to_bytes(int(size), "little")
        assert data[at : at + int(size)] == expected, field
    last = table[-1][0]
    covered = zlib.crc32(data[:last] + data[frame.HEADER_BYTES :])
    assert data[last : frame.HEADER_BYTES] == covered.to_bytes(4, "little")


def test_a_reply_lies_as_the_table_says() -> None:
    table = byte_table("field of a reply")
    reply = Reply(
        kind=ReplyKind.FAIL, transfer=FRAME.transfer, attempt=FRAME.attempt, consumed=FRAME.send_ns, reason="why"
    )
    data = frame.encode_reply(reply)
    values: list[Any] = [
        frame.MAGIC, frame.PROTOCOL_VERSION, reply.kind, 0, reply.transfer, reply.attempt, reply.consumed, 3,
    ]  # fmt: skip
    for (at, size, field), value in zip(table[:-1], values, strict=True):
        expected = value if isinstance(value, bytes) else int(value).to_bytes(int(size), "little")
        assert data[at : at + int(size)] == expected, field
    rest = data[table[-1][0] :]
    assert rest == b"why" + zlib.crc32(data[:-4]).to_bytes(4, "little")
    assert f"({frame.MAX_REPLY_BYTES} bytes at most)" in FRAMES


@pytest.mark.parametrize("kinds", [FrameKind, ReplyKind])
def test_every_kind_has_its_number(kinds: type[FrameKind] | type[ReplyKind]) -> None:
    assert f"kind: {', '.join(f'{kind.value} {kind.name}' for kind in kinds)} |" in FRAMES
