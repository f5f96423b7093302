"""Blocks and pools that a transfer of the benchmark carries. Both ends work them out alike from its number."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache

from tandem.core.ids import Attempt, BlockId, GroupId, Incarnation, RequestId, TransferId, WorkerId
from tandem.core.kv_layout import KVGroupSpec, KVLayout
from tandem.core.secret import ClusterSecret
from tandem.kvtransfer.ticket import Endpoint, GroupBlocks, Ticket

SECRET = ClusterSecret(b"nothing but a benchmark")
SENDER, RECEIVER = Incarnation(1), Incarnation(2)
POOL_BYTES = 128 << 20
"""Four times the largest cache that is common today, so that transfers read and write memory."""

SQUARE = KVGroupSpec(
    group=GroupId(0), layers=tuple(range(4)), planes=2, heads=4, width=64, block_tokens=16, dtype="bfloat16"
)
"""Blocks of 64 KiB, so that transfers have round sizes."""
SMALL_135M = KVGroupSpec(
    group=GroupId(0), layers=tuple(range(30)), planes=2, heads=3, width=64, block_tokens=16, dtype="bfloat16"
)
"""Blocks of 360 KiB: 30 layers, 3 KV heads of 64."""
SPECS = {"square": SQUARE, "135m": SMALL_135M}


@dataclass(frozen=True, slots=True)
class Places:
    """Blocks in random order, the same for every run; each transfer takes the next ones, so that memory stays cold."""

    num_blocks: int
    seed: int

    def blocks(self, number: int, count: int) -> tuple[BlockId, ...]:
        """`count` blocks of the transfer called `number`."""
        order = _shuffled(self.num_blocks, self.seed)
        start = number * count % self.num_blocks
        return tuple(BlockId(order[(start + place) % self.num_blocks]) for place in range(count))


@cache
def _shuffled(count: int, seed: int) -> tuple[int, ...]:
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return tuple(order)


def num_blocks(spec: KVGroupSpec) -> int:
    return POOL_BYTES // spec.block_bytes()


def source(spec: KVGroupSpec) -> Places:
    return Places(num_blocks(spec), 1)


def target(spec: KVGroupSpec) -> Places:
    return Places(num_blocks(spec), 2)


def ticket(
    number: int, blocks: tuple[BlockId, ...], endpoints: tuple[Endpoint, ...], spec: KVGroupSpec, codec: str = ""
) -> Ticket:
    """The receiver's promise for transfer `number`, in blocks of `spec`."""
    return Ticket(
        transfer=TransferId(number), request=RequestId(f"r{number}"), attempt=Attempt(1), sender=WorkerId("p"),
        sender_incarnation=SENDER, receiver=WorkerId("d"), receiver_incarnation=RECEIVER,
        groups=(GroupBlocks(group=GroupId(0), skip=0, blocks=blocks),), endpoints=endpoints,
        layout=KVLayout(groups=(spec,)), codec=codec,
    )  # fmt: skip
