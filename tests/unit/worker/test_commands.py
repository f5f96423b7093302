"""Commands and reports survive their way as bytes."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.core.ids import Attempt, BlockId, GroupId, Incarnation, Rank, RequestId, TransferId, WorkerId
from tandem.core.kv_layout import KVGroupSpec, KVLayout
from tandem.core.link_speed import ReportedLink
from tandem.engine.runner_protocol import SeqSlice, StepBatch
from tandem.kvtransfer.events import Failed, Quiesced, SendCompleted, SendFailed, Verified
from tandem.kvtransfer.ticket import Endpoint, GroupBlocks, Ticket
from tandem.worker import commands, reports
from tandem.worker.commands import decode, encode
from tandem.workercore.message_ring import REPORT_BYTES

I31 = st.integers(0, 2**31 - 1)
U32 = st.integers(0, 2**32 - 1)
U63 = st.integers(1, 2**63 - 1)
BLOCKS = st.lists(I31.map(BlockId), max_size=40)
THEIR_BLOCKS = st.lists(U32.map(BlockId), max_size=40)
"""Any value that a ticket can name."""
TRANSFERS = U63.map(TransferId)
NAMES = st.text(max_size=20)
SECONDS = st.floats(0, 1e9)


@st.composite
def steps(draw: st.DrawFn) -> commands.Step:
    groups = draw(st.integers(1, 3))
    sequences = [
        SeqSlice(draw(I31), draw(I31), tuple(draw(st.lists(I31, max_size=20)) for _ in range(groups)))
        for _ in range(draw(st.integers(1, 6)))
    ]
    tokens = draw(st.lists(I31, max_size=50))
    positions = draw(st.lists(I31, min_size=len(tokens), max_size=len(tokens)))
    return commands.Step(StepBatch(tokens, positions, sequences, draw(st.lists(I31, max_size=9))), draw(st.booleans()))


@st.composite
def tickets(draw: st.DrawFn) -> Ticket:
    spec = KVGroupSpec(
        group=GroupId(0), layers=(0, 1, 2), planes=2, heads=4, width=32, block_tokens=16, dtype="bfloat16"
    )
    endpoint = st.builds(Endpoint, rank=st.integers(0, 7).map(Rank), transport=NAMES, host=NAMES, address=NAMES)
    blocks = st.builds(GroupBlocks, group=I31.map(GroupId), skip=I31, blocks=BLOCKS.map(tuple))
    return Ticket(
        transfer=draw(TRANSFERS),
        request=RequestId(draw(NAMES)),
        attempt=Attempt(draw(I31)),
        sender=WorkerId(draw(NAMES)),
        sender_incarnation=Incarnation(draw(U63)),
        receiver=WorkerId(draw(NAMES)),
        receiver_incarnation=Incarnation(draw(U63)),
        groups=tuple(draw(st.lists(blocks, max_size=3))),
        endpoints=tuple(draw(st.lists(endpoint, max_size=4))),
        layout=draw(st.sampled_from([KVLayout(groups=(spec,), tp=tp) for tp in (1, 2)])),
        codec=draw(st.sampled_from(["", "int8"])),
    )


@st.composite
def pushes(draw: st.DrawFn) -> commands.PushCommand:
    first = draw(st.integers(0, 99))
    layers = range(first, first + draw(st.integers(1, 99)))
    return commands.PushCommand(
        draw(TRANSFERS), GroupId(draw(I31)), draw(BLOCKS), draw(THEIR_BLOCKS), layers, draw(U32),
        draw(st.none() | I31),
    )  # fmt: skip


COMMANDS = st.one_of(
    steps(),
    pushes(),
    st.builds(commands.CopyBlocks, I31, st.lists(st.tuples(I31, I31), max_size=20)),
    st.builds(commands.Expect, tickets()),
    st.builds(commands.Open, tickets()),
    st.builds(commands.CancelReceiving, TRANSFERS, NAMES),
    st.builds(commands.SetIncarnation, U63.map(Incarnation)),
    st.just(commands.Stop()),
    *(
        st.builds(kind, TRANSFERS)
        for kind in (commands.Admit, commands.Revoke, commands.Finish, commands.CancelSending)
    ),
)
REPORTS = st.one_of(
    st.builds(reports.Expected, TRANSFERS),
    st.builds(reports.Counters, st.dictionaries(NAMES, U63, max_size=5)),
    st.builds(Verified, transfer=TRANSFERS, last_wire_s=SECONDS, verified_at_s=SECONDS, bytes=U63),
    st.builds(Failed, transfer=TRANSFERS, reason=NAMES),
    st.builds(SendCompleted, transfer=TRANSFERS, bytes=U63),
    st.builds(SendFailed, transfer=TRANSFERS, reason=NAMES),
    st.builds(Quiesced, transfer=TRANSFERS),
    st.builds(
        reports.Links,
        st.lists(
            st.builds(
                ReportedLink,
                peer=NAMES.map(WorkerId),
                peer_rank=st.integers(0, 7).map(Rank),
                transport=NAMES,
                reason=NAMES,
                rank=st.integers(0, 7).map(Rank),
                stalls=U32,
                from_host=NAMES,
                to_host=NAMES,
                bytes_per_s=SECONDS,
                latency_s=SECONDS,
                achieved_bytes_per_s=SECONDS,
                unused=st.lists(NAMES, max_size=2).map(tuple),
            ),
            max_size=4,
        ).map(tuple),
    ),
    st.builds(
        reports.Hello,
        st.lists(
            st.builds(Endpoint, rank=st.integers(0, 7).map(Rank), transport=NAMES, host=NAMES, address=NAMES),
            max_size=4,
        ).map(tuple),
    ),
)


def plain(command: commands.Command) -> commands.Command:
    """Block tables of a step come as arrays; compare them as lists."""
    if isinstance(command, commands.Step):
        for sequence in command.batch.sequences:
            sequence.block_tables = tuple(list(table) for table in sequence.block_tables)
    return command


@given(COMMANDS, st.integers(0, 2**16 - 1))
@settings(max_examples=300, deadline=None)
def test_a_command_comes_out_as_it_went_in(command: commands.Command, after_layers: int) -> None:
    after, decoded = decode(encode(command, after_layers))
    assert (after, plain(decoded)) == (after_layers, command)


@given(REPORTS)
@settings(max_examples=300, deadline=None)
def test_a_report_comes_out_as_it_went_in(report: reports.Report) -> None:
    assert reports.decode(reports.encode(report)) == report


@given(pushes())
def test_a_push_that_was_cut_is_refused(push: commands.PushCommand) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode(encode(push)[:-4])


def test_tables_that_are_no_lists_travel_too() -> None:
    batch = StepBatch([1], [0], [SeqSlice(1, 1, (range(5, 8),))], [0])
    _, decoded = decode(encode(commands.Step(batch, has_hook=False)))
    assert isinstance(decoded, commands.Step)
    assert list(decoded.batch.sequences[0].block_tables[0]) == [5, 6, 7]


def test_a_worker_with_thousands_of_links_reports_those_that_fit() -> None:
    """A report that no ring takes would end the follower."""
    links = tuple(
        ReportedLink(
            peer=WorkerId(f"decode-{number}"),
            peer_rank=Rank(number % 8),
            rank=Rank(1),
            stalls=0,
            transport="tcp",
            reason="fastest of tcp, grpc",
            from_host="here" * 20,
            to_host="there" * 20,
            unused=("shm failed: " + "no such file or directory" * 8,),
        )
        for number in range(3000)
    )
    data = reports.encode(reports.Links(links))
    said = reports.decode(data)
    assert isinstance(said, reports.Links)
    assert said.links == links[: len(said.links)]
    assert reports.MAX_LINKS_BYTES * 0.9 < len(data) <= reports.MAX_LINKS_BYTES < REPORT_BYTES // 2 - 8
