"""From source pools to destination pools without sockets: any block sizes, dtypes, codecs and splits of heads."""

import random
import zlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.core.clock import ManualClock
from tandem.core.ids import Attempt, BlockId, GroupId, Incarnation, Rank, RequestId, TransferId, WorkerId
from tandem.core.kv_compatibility import Codec
from tandem.core.kv_layout import KVGroupSpec, KVLayout
from tandem.kernels import native
from tandem.kernels.dtypes import TORCH_DTYPES
from tandem.kernels.kv_payload.reference import convert_reference, decode_reference, encode_reference
from tandem.kvtransfer import frame_checks
from tandem.kvtransfer.events import Verified
from tandem.kvtransfer.frame import Frame, FrameKind, MalformedFrameError, ReplyKind
from tandem.kvtransfer.head_routes import slices
from tandem.kvtransfer.jobs import PayloadReader
from tandem.kvtransfer.kv_pool_access import HostPool, TokenRun
from tandem.kvtransfer.outgoing_transfer import Outgoing
from tandem.kvtransfer.receiver_core import ReceiverCore
from tandem.kvtransfer.ticket import Endpoint, GroupBlocks, Ticket
from tandem.kvtransfer.transports.base import Peer
from tandem.kvtransfer.wire_codec import PayloadForm
from tests.unit.kvtransfer.conftest import control

SENDER, RECEIVER = Incarnation(11), Incarnation(22)
G0 = GroupId(0)
GROUPS = (
    KVGroupSpec(group=G0, layers=(0, 1, 2), planes=2, heads=4, width=6, block_tokens=4, dtype="float32"),
    KVGroupSpec(group=G0, layers=(0, 1), planes=2, heads=2, width=5, block_tokens=4, dtype="float32"),
    KVGroupSpec(
        group=G0, layers=(0, 3), planes=1, heads=1, width=9, block_tokens=4, dtype="float32", is_replicated=True
    ),
)


def bytes_of(x: torch.Tensor) -> bytes:
    return x.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


class Worker:
    """The pools of every rank of one worker, in its geometry, and where the tokens of one prompt lie in them."""

    def __init__(self, spec: KVGroupSpec, tp: int, tokens: int, seed: int) -> None:
        self.spec, self.tp, self.tokens = spec, tp, tokens
        needed = spec.blocks_for(tokens)
        self.blocks = tuple(map(BlockId, random.Random(seed).sample(range(needed + 3), needed)))
        self.memory = [bytearray((needed + 3) * spec.block_bytes(tp)) for _ in range(tp)]
        self.pools = [HostPool(spec, tp, memoryview(data)) for data in self.memory]

    def store(self, numbers: torch.Tensor, before: float = 0.0) -> None:
        """`numbers`: `[layers, planes, heads, tokens, width]` of the model; the pool held `before` everywhere."""
        for rank in range(self.tp):
            self.memory[rank][:] = self.image(numbers, rank, before)

    def image(self, numbers: torch.Tensor, rank: int, before: float = 0.0) -> bytes:
        """Return a rank's memory with exactly these numbers in it."""
        spec, size = self.spec, self.spec.block_tokens
        heads = spec.heads_of(rank, self.tp)
        shape = (len(self.blocks) + 3, len(spec.layers), spec.planes, len(heads), size, spec.width)
        pool = torch.full(shape, before, dtype=TORCH_DTYPES[spec.dtype])
        for index, block in enumerate(self.blocks):
            part = numbers[:, :, heads.start : heads.stop, index * size : (index + 1) * size]
            pool[block, :, :, :, : part.shape[3]] = part
        return bytes_of(pool)


def ticket_for(target: Worker, skip: int, codec: str) -> Ticket:
    return Ticket(
        transfer=TransferId(1), request=RequestId("r"), attempt=Attempt(1), sender=WorkerId("p0"),
        sender_incarnation=SENDER, receiver=WorkerId("d0"), receiver_incarnation=RECEIVER,
        groups=(GroupBlocks(group=G0, skip=skip, blocks=target.blocks[skip:]),),
        endpoints=tuple(Endpoint(rank=Rank(r), transport="none", host="", address="") for r in range(target.tp)),
        layout=KVLayout(groups=(target.spec,), tp=target.tp), codec=codec,
    )  # fmt: skip


def transfer(source: Worker, target: Worker, ticket: Ticket, limit: int, order: random.Random) -> list[Any]:
    """Send all of the ticket from every source rank to every destination rank; the events."""
    events: list[Any] = []
    for dest in range(target.tp):
        intake = ReceiverCore(
            incarnation=RECEIVER, rank=Rank(dest), pools={G0: target.pools[dest]}, on_event=events.append,
            clock=ManualClock(1.0),
        )  # fmt: skip
        intake.expect(ticket)
        link = intake.connect(Peer(worker=WorkerId("p0"), incarnation=SENDER, rank=Rank(0), host="h"))
        for frame, payload in frames_for(source, ticket, dest, limit, order):
            assert intake.accept(frame, memoryview(payload), link).kind is ReplyKind.ACK
    return events


def frames_for(
    source: Worker, ticket: Ticket, dest: int, limit: int, order: random.Random
) -> list[tuple[Frame, bytearray]]:
    out, reader = [], PayloadReader()
    (group,) = ticket.groups
    if not group.blocks:
        return []
    for rank in range(source.tp):
        outgoing = Outgoing(ticket, {G0: source.pools[rank]}, Rank(rank), ManualClock(1.0))
        form = outgoing.forms[G0]
        skipped = group.skip * form.spec.block_tokens
        first, offset = divmod(skipped, source.spec.block_tokens)
        run = TokenRun(source.blocks[first:], source.spec.block_tokens, offset, source.tokens - skipped)
        assert run.reaches(len(group.blocks), form.spec.block_tokens)
        for route in outgoing.routes[G0]:
            if route.dest_rank != dest:
                continue
            layers = range(len(source.spec.layers))
            for part in slices(form, run, group.blocks, layers, route, limit):
                payload = bytearray(part.payload_bytes)
                crc = reader.read(source.pools[rank], form, part, memoryview(payload))
                assert crc == zlib.crc32(payload)
                frame = replace(
                    outgoing.frame(FrameKind.DATA, Rank(dest)), group=G0, layers=part.layers,
                    heads=part.dest_heads, blocks=part.dest_blocks, payload_bytes=len(payload), payload_crc=crc,
                    codec=form.codec,
                )  # fmt: skip
                out.append((frame, payload))
    order.shuffle(out)
    return out


def expected(numbers: torch.Tensor, source: Worker, target: Worker, codec: str) -> torch.Tensor:
    """Return the expected contents of the receiver: every row of its own blocks through the reference."""
    dtype = TORCH_DTYPES[target.spec.dtype]
    if not codec:
        return numbers if source.spec.dtype == target.spec.dtype else convert_reference(numbers, dtype)
    size, tokens = target.spec.block_tokens, numbers.shape[3]
    padded = torch.nn.functional.pad(numbers, (0, 0, 0, -tokens % size))
    rows = padded.reshape(-1, size * target.spec.width)
    back = decode_reference(codec, *encode_reference(codec, rows), dtype)
    return back.reshape(padded.shape)[:, :, :, :tokens]


tps = st.sampled_from([1, 2, 4])
sizes = st.sampled_from([1, 3, 4, 8, 16])
dtypes = st.sampled_from(list(TORCH_DTYPES))


@settings(deadline=None, max_examples=150)
@given(
    spec=st.sampled_from(GROUPS), tps=st.tuples(tps, tps), sizes=st.tuples(sizes, sizes),
    dtypes=st.tuples(dtypes, dtypes), codec=st.sampled_from(["", "", "int8", "fp8"]),
    tokens=st.integers(1, 50), skip=st.integers(0, 20),
    limit=st.sampled_from([1 << 20, 4000, 1600]), is_native=st.booleans(), seed=st.integers(0, 9),
    before=st.sampled_from([0.0, 3e4, float("nan"), float("inf")]),
)  # fmt: skip
def test_every_pair_of_geometries_moves_the_same_numbers(
    spec: KVGroupSpec, tps: tuple[int, int], sizes: tuple[int, int], dtypes: tuple[str, str], codec: str,
    tokens: int, skip: int, limit: int, is_native: bool, seed: int, before: float,
) -> None:  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "_is_enabled", is_native)
        source = Worker(replace(spec, block_tokens=sizes[0], dtype=dtypes[0]), tps[0], tokens, seed)
        target = Worker(replace(spec, block_tokens=sizes[1], dtype=dtypes[1]), tps[1], tokens, seed + 100)
        generator = torch.Generator().manual_seed(seed)
        shape = (len(spec.layers), spec.planes, spec.heads, tokens, spec.width)
        numbers = (torch.randn(shape, generator=generator) * 3).to(TORCH_DTYPES[dtypes[0]])
        source.store(numbers, before if codec else 0.0)  # under a codec nothing may show what a block held before
        skip = min(skip, tokens // sizes[1])
        wanted = expected(numbers, source, target, codec)
        wanted[:, :, :, : skip * sizes[1]] = 0  # what is there already is not sent
        events = transfer(source, target, ticket_for(target, skip, codec), limit, random.Random(seed))
        assert [type(e) for e in events] == [Verified] * target.tp
        for rank in range(target.tp):
            assert bytes(target.memory[rank]) == target.image(wanted, rank)


def pair(codec: str = "") -> tuple[Worker, Worker, Ticket]:
    source = Worker(replace(GROUPS[0], dtype="bfloat16"), 1, 20, 1)
    target = Worker(replace(GROUPS[0], block_tokens=8), 1, 20, 2)
    source.store(torch.randn(3, 2, 4, 20, 6).to(torch.bfloat16))
    return source, target, ticket_for(target, 0, codec)


def intake_of(target: Worker, ticket: Ticket) -> tuple[ReceiverCore, Any, list[Any]]:
    events: list[Any] = []
    intake = ReceiverCore(
        incarnation=RECEIVER, rank=Rank(0), pools={G0: target.pools[0]}, on_event=events.append, clock=ManualClock(1.0)
    )
    intake.expect(ticket)
    peer = Peer(worker=WorkerId("p0"), incarnation=SENDER, rank=Rank(0), host="h")
    return intake, intake.connect(peer), events


@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_a_flipped_bit_of_an_encoded_payload_is_never_decoded(codec: str) -> None:
    source, target, ticket = pair(codec)
    intake, link, events = intake_of(target, ticket)
    frame, payload = frames_for(source, ticket, 0, 1 << 20, random.Random(0))[0]
    payload[len(payload) // 2] ^= 8
    assert intake.accept(frame, memoryview(payload), link).kind is ReplyKind.FAIL
    assert "checksum mismatch" in events[0].reason
    assert not any(target.memory[0])


@pytest.mark.parametrize(("agreed", "sent"), [("", Codec.INT8), ("int8", Codec.NONE), ("int8", Codec.FP8)])
def test_another_codec_than_the_tickets_is_malformed(agreed: str, sent: Codec) -> None:
    source, target, ticket = pair(agreed)
    intake, link, _ = intake_of(target, ticket)
    frame, payload = frames_for(source, ticket, 0, 1 << 20, random.Random(0))[0]
    with pytest.raises(MalformedFrameError, match="codec"):
        intake.accept(replace(frame, codec=sent), memoryview(payload), link)
    assert not any(target.memory[0])


def test_what_travels_encoded_is_smaller_by_the_codec() -> None:
    source, target, plain = pair()
    bytes_as = {
        codec: sum(len(p) for _, p in frames_for(source, replace(plain, codec=codec), 0, 1 << 20, random.Random(0)))
        for codec in ("", "int8", "fp8")
    }
    rows = len(target.blocks) * 3 * 2 * 4
    assert bytes_as[""] == rows * 8 * 6 * 4
    assert bytes_as["int8"] == bytes_as["fp8"] == rows * (8 * 6 + 4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"codec": "zip"}, "unknown wire codec"),
        ({"layout": KVLayout(groups=(replace(GROUPS[0], width=7),))}, "another shape"),
        ({"layout": KVLayout(groups=(replace(GROUPS[0], heads=8),))}, "another shape"),
        ({"layout": KVLayout(groups=())}, "another shape"),
        ({"layout": KVLayout(groups=(GROUPS[0],), tp=2)}, "for 2 ranks"),
    ],
)
def test_a_ticket_that_cannot_be_kept_is_refused(changes: dict[str, Any], words: str) -> None:
    source, target, ticket = pair()
    with pytest.raises(ValueError, match=words):
        Outgoing(replace(ticket, **changes), {G0: source.pools[0]}, Rank(0), ManualClock(1.0))
    if "codec" in changes:
        with pytest.raises(ValueError, match=words):
            intake_of(target, replace(ticket, **changes))


@given(
    blocks=st.integers(0, 6), size=st.integers(1, 9), offset=st.integers(-1, 9), targets=st.integers(0, 6),
    theirs=st.integers(1, 9),
)  # fmt: skip
def test_a_run_reaches_when_no_block_at_either_side_is_idle(
    blocks: int, size: int, offset: int, targets: int, theirs: int
) -> None:
    run = TokenRun(tuple(map(BlockId, range(blocks))), size, offset)
    if not 0 <= offset < size:
        assert not run.reaches(targets, theirs)
        return
    given_to = {index for t in range(targets * theirs) if (index := (offset + t) // size) < blocks}
    filled = {t // theirs for t in range(targets * theirs) if (offset + t) // size < blocks}
    assert run.reaches(targets, theirs) == (len(given_to) == blocks and len(filled) == targets)


def test_a_probe_is_summed_dropped_and_acknowledged(bench: Any) -> None:
    before = bench.image()
    payload = random.Random(1).randbytes(5000)
    probe = control(kind=FrameKind.PROBE, transfer=TransferId(0), payload_bytes=5000, payload_crc=zlib.crc32(payload))
    assert bench.send(probe, payload).kind is ReplyKind.ACK
    reply = bench.send(probe, payload[:-1] + b"?")
    assert (reply.kind, reply.reason) == (ReplyKind.FAIL, "checksum")
    with pytest.raises(MalformedFrameError, match="payload bytes, expected"):
        bench.send(probe, payload[:-1])
    assert (bench.intake.counters()["probes"], bench.dropped("checksum")) == (1, 1)
    assert bench.image() == before
    assert bench.events == []


@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_what_is_decoded_is_what_was_summed(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A payload in shared memory, that its sender, being broken, writes again once it was found intact."""
    source, target, ticket = pair(codec)
    frame, payload = frames_for(source, ticket, 0, 1 << 20, random.Random(0))[0]
    intake, link, _ = intake_of(target, ticket)
    intake.accept(frame, memoryview(bytes(payload)), link)
    expected = bytes(target.memory[0])
    target.memory[0][:] = bytes(len(expected))

    def and_then_it_is_written(frame: Frame, crc: int) -> bool:
        payload[:] = bytes(len(payload))
        return frame.payload_crc == crc

    monkeypatch.setattr(frame_checks, "is_intact", and_then_it_is_written)
    intake, link, events = intake_of(target, ticket)
    assert intake.accept(frame, memoryview(payload), link).kind is ReplyKind.ACK
    assert [type(e) for e in events] == [Verified]
    assert bytes(target.memory[0]) == expected


def test_a_link_thread_decodes_in_memory_that_it_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A payload's worth of fresh memory for each frame, and the numbers' again, would be zeroed for nothing."""
    source, target, ticket = pair("int8")
    rooms: list[tuple[object, object]] = []
    usual = PayloadForm.decode

    def decode(form: PayloadForm, payload: memoryview, out: memoryview) -> memoryview:
        rooms.append((payload.obj, out.obj))
        return usual(form, payload, out)

    monkeypatch.setattr(PayloadForm, "decode", decode)
    events = transfer(source, target, ticket, 512, random.Random(3))
    assert [type(event) for event in events] == [Verified]
    assert len(rooms) > 5
    for kept in zip(*rooms, strict=True):  # the larger ones of the frames may come last
        assert len({id(room) for room in kept}) <= 2
