"""The pages on KV transfer and frames.md against the code: guarantees, transports, offsets in the tables of bytes."""

import re
import zlib
from pathlib import Path
from typing import Any

import pytest

from tandem.core.ids import Attempt, BlockId, GroupId, Incarnation, Rank, TransferId
from tandem.core.kv_compatibility import Codec
from tandem.kvtransfer import frame, link_meter, link_speeds, probed_connection, remeasure
from tandem.kvtransfer.frame import Checksum, Frame, FrameKind, FrameReply, ReplyKind
from tandem.kvtransfer.transports import base, collective, flow_control, frame_seqlock, grpc, ipc, payload_ring
from tandem.kvtransfer.transports.registry import TRANSPORTS

ROOT = Path(__file__).resolve().parents[3]
OVERVIEW = (ROOT / "docs/transfer.md").read_text()
PROTOCOL = (ROOT / "docs/transfer/protocol.md").read_text()
LINKS = (ROOT / "docs/transfer/links.md").read_text()
FRAMES = (ROOT / "docs/frames.md").read_text()
PAGES = sorted((ROOT / "docs" / "transfer").glob("*.md"))


def section(text: str, title: str) -> str:
    """Return `text` from the heading to the next of its level or above."""
    mark = re.match(r"#+", title)
    assert mark is not None
    start = text.index(f"\n{title}\n") + len(title) + 2
    following = re.search(rf"^#{{1,{len(mark[0])}}} ", text[start:], re.MULTILINE)
    return text[start : start + following.start()] if following else text[start:]


def rows(text: str) -> list[list[str]]:
    """The cells of every table row, headings among them."""
    lines = [line for line in text.splitlines() if line.startswith("|") and not line.startswith("|---")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def byte_table(heading: str) -> list[tuple[int, str, str]]:
    """(offset, size, field) of the table whose last column is called `heading`."""
    start = FRAMES.index(f"| at | bytes | {heading} |\n")
    end = FRAMES.find("\n\n", start)
    return [(int(at), size, field) for at, size, field in rows(FRAMES[start:end])[1:]]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_page_begins_with_a_summary_and_is_linked(page: Path) -> None:
    title, blank, *rest = page.read_text().splitlines()
    assert title.startswith("# KV transfer: ")
    assert (blank, rest[5]) == ("", "")
    assert all(line.startswith("- ") for line in rest[:5])
    assert f"(transfer/{page.name})" in OVERVIEW


def test_the_overview_is_short() -> None:
    assert len(OVERVIEW.splitlines()) <= 60


def test_every_promise_names_a_proof() -> None:
    promises = [row for row in rows(section(PROTOCOL, "## Guarantees and proofs"))[1:] if row[1]]
    assert len(promises) > 25
    for promise, _, proof in promises:
        named = re.findall(r"`(tests/[^`]+|make proof NAME=\w+)`", proof)
        assert named, promise
        assert any((ROOT / path).exists() for path in named), promise


def test_every_transport_has_a_row() -> None:
    tables = rows(section(LINKS, "## Transports"))
    about = [row[0].strip("`") for row in tables if len(row) == 6][1:]
    assert about == list(TRANSPORTS)
    for wide, text in ((4, section(LINKS, "## Transports")), (5, FRAMES)):
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
    reply = FrameReply(
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


MIB = 1 << 20
UNDER_WAY: dict[str, tuple[float, ...]] = {
    "shm": (payload_ring.RING_BYTES, payload_ring.MAX_RING_PAYLOAD_BYTES),
    "tcp": (base.WINDOW_BYTES, frame.MAX_PAYLOAD_BYTES, flow_control.REPORT_BYTES),
    "grpc": (grpc.WINDOW_BYTES, grpc.MAX_PAYLOAD_BYTES, grpc.REPORT_BYTES),
    "gloo": (
        payload_ring.RING_BYTES, collective.MAX_FRAMES, collective.MAX_PAYLOAD_BYTES,
        payload_ring.RING_BYTES / collective.REPORT_EVERY, collective.MAX_FRAMES / collective.REPORT_EVERY,
    ),
    "cpu_ipc": (payload_ring.RING_BYTES, frame_seqlock.MAX_FRAMES, payload_ring.RING_BYTES / ipc.SHARE),
}  # fmt: skip


@pytest.mark.parametrize("name", UNDER_WAY)
def test_how_much_is_under_way(name: str) -> None:
    """The figures of a row in order: bytes as MiB, counts as they are."""
    table = section(LINKS, "## Transports")
    (row,) = [
        one for one in rows(table[table.index("| transport | window |") :]) if f"`{name}`" in one[0] and len(one) == 4
    ]
    told = [
        float(number) * (MIB if unit == "MiB" else 1) for number, unit in re.findall(r"(\d+) (MiB|frames)", str(row))
    ]
    assert told[: len(UNDER_WAY[name])] == list(UNDER_WAY[name])


def figures(pattern: str) -> list[float]:
    """Return the groups of `pattern` in the section on measured links as numbers; it matches once."""
    (found,) = re.findall(pattern, " ".join(section(LINKS, "## Transport selection").split()))
    words = {"two": 2, "four": 4, "five": 5}
    return [words.get(one) or float(one) for one in ([found] if isinstance(found, str) else found)]


def test_how_links_are_measured() -> None:
    assert figures(r"(\w+) small round trips, then rounds of probes that double from (\d+) KiB") == [
        probed_connection.PINGS,
        probed_connection.FIRST_ROUND_BYTES / 1024,
    ]
    assert figures(r"up to (\d+) MiB or (\d+) ms") == [
        probed_connection.MOST_BYTES / MIB,
        probed_connection.MOST_S * 1000,
    ]
    assert figures(r"faster of the last (\w+) rounds") == [probed_connection.LAST_ROUNDS]
    assert figures(r"others wait for it, (\d+) s at most") == [link_speeds.TURN_S]
    assert figures(r"within a factor of ([\d.]+) the order decides") == [link_speeds.MARGIN]


def test_when_links_are_measured_again() -> None:
    assert figures(r"not measured again\*\* for (\d+) minutes") == [link_speeds.FRESH_S / 60]
    assert figures(r"idle, after (\d+) s, doubling to (\d+) min") == [
        link_speeds.FIRST_RETRY_S,
        link_speeds.LAST_RETRY_S / 60,
    ]
    assert figures(r"After (\d+) MiB or (\d+) transfers, and ([\d.]+) s") == [
        link_meter.ENOUGH_BYTES / MIB,
        link_meter.ENOUGH_TRANSFERS,
        link_meter.LEAST_BUSY_S,
    ]
    assert figures(r"was busy (\w+) times as long") == [link_meter.FAR]
    assert figures(r"when idle \(after (\d+) s in any case\)") == [remeasure.PATIENCE_S]
    assert figures(r"doubles from (\d+) s to (\d+) min") == [remeasure.FIRST_PAUSE_S, remeasure.LAST_PAUSE_S / 60]
    assert figures(r"busy \(– under (\d+) MiB\)") == [link_meter.TELLING_BYTES / MIB]
