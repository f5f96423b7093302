"""A ticket is used only in the form that follows from both profiles, and only with room for exactly the prompt."""

import dataclasses
from typing import Any

import pytest

from tandem.core.block_hash import BlockHash
from tandem.core.errors import TransferError
from tandem.core.ids import Attempt, BlockId, GroupId, Incarnation, RequestId, RouterId, TransferId, WorkerId
from tandem.core.kv_compatibility import KVProfile
from tandem.core.kv_layout import KVGroupSpec, KVLayout
from tandem.core.sampling import SamplingParams
from tandem.engine.request import EngineRequest
from tandem.kvtransfer.ticket import GroupBlocks, Ticket
from tandem.prefill_worker.handover import Handover
from tandem.rpc.v1 import worker_pb2 as w
from tandem.workercore.requests import Tracked

PROMPT_TOKENS = 40


def profile(block_tokens: int = 16, dtype: str = "float32", groups: int = 1, **more: Any) -> KVProfile:
    specs = tuple(
        KVGroupSpec(
            group=GroupId(index), layers=(index,), planes=2, heads=2, width=8, block_tokens=block_tokens, dtype=dtype
        )
        for index in range(groups)
    )
    return KVProfile(fingerprint="f", identity=(), layout=KVLayout(groups=specs), **more)


def handover(*offered: str) -> Handover:
    request = EngineRequest(
        key="r#1", prompt=tuple(range(PROMPT_TOKENS)), sampling=SamplingParams(max_tokens=4),
        hash_root=BlockHash(bytes(16)),
    )  # fmt: skip
    tracked = Tracked(
        router=RouterId("router"), request=RequestId("r"), attempt=Attempt(1), deadline_s=9.0, engine_request=request,
    )  # fmt: skip
    made = Handover(tracked, w.WorkerRef(worker="d0"))
    made.offered = offered
    return made


def ticket(*blocks: tuple[int, int], codec: str = "") -> Ticket:
    """`blocks`: skip and count of each group."""
    groups = tuple(
        GroupBlocks(group=GroupId(index), skip=skip, blocks=tuple(BlockId(b) for b in range(count)))
        for index, (skip, count) in enumerate(blocks)
    )
    return Ticket(
        transfer=TransferId(7), request=RequestId("r"), attempt=Attempt(1), sender=WorkerId("p0"),
        sender_incarnation=Incarnation(1), receiver=WorkerId("d0"), receiver_incarnation=Incarnation(2),
        groups=groups, endpoints=(), layout=KVLayout(groups=()), codec=codec,
    )  # fmt: skip


@pytest.mark.parametrize(("size", "needed"), [(1, 40), (8, 5), (16, 3), (24, 2), (40, 1), (64, 1)])
def test_blocks_are_counted_in_the_receivers_size(size: int, needed: int) -> None:
    for skip in range(needed + 1):
        handover().check(ticket((skip, needed - skip)), profile(), profile(size))
    for wrong in (needed - 1, needed + 1):
        with pytest.raises(TransferError, match=f"0 \\+ {wrong} blocks for a prompt of {needed}"):
            handover().check(ticket((0, wrong)), profile(), profile(size))


def test_every_group_needs_room() -> None:
    handover().check(ticket((0, 3), (3, 0)), profile(groups=2), profile(groups=2))
    with pytest.raises(TransferError, match="it has 1 KV groups, this model 2"):
        handover().check(ticket((0, 3)), profile(groups=2), profile(groups=2))
    swapped = ticket((0, 3), (0, 3))
    swapped = dataclasses.replace(swapped, groups=swapped.groups[::-1])
    with pytest.raises(TransferError, match="group 1 has"):
        handover().check(swapped, profile(groups=2), profile(groups=2))


@pytest.mark.parametrize(
    ("offered", "known", "codec", "follows"),
    [
        ((), ("int8", "fp8"), "", True),
        ((), ("int8", "fp8"), "int8", False),
        (("int8",), ("int8", "fp8"), "int8", True),
        (("int8",), ("int8", "fp8"), "", False),
        (("int8",), ("int8", "fp8"), "fp8", False),
        (("int8", "fp8"), ("fp8",), "fp8", True),
        (("int8",), (), "", True),
    ],
)
def test_the_codec_is_the_one_that_follows(
    offered: tuple[str, ...], known: tuple[str, ...], codec: str, follows: bool
) -> None:
    receiver = profile(codecs=known)
    if follows:
        handover(*offered).check(ticket((0, 3), codec=codec), profile(), receiver)
        return
    with pytest.raises(TransferError, match=f"its codec is {codec or 'none'} instead of"):
        handover(*offered).check(ticket((0, 3), codec=codec), profile(), receiver)


def test_a_receiver_that_does_not_fit() -> None:
    handover().check(ticket((0, 3)), profile(), profile(dtype="bfloat16"))
    with pytest.raises(TransferError, match="cannot be converted"):
        handover().check(ticket((0, 3)), profile(), profile(dtype="int4"))
    with pytest.raises(TransferError, match="protocol differs"):
        handover().check(ticket((0, 3)), profile(), profile(protocol=(3, 0)))
