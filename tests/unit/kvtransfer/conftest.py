"""Small pools, tickets and frames for the parts of kvtransfer that need no sockets."""

import random
import zlib
from typing import Any

import pytest

from tandem.core.clock import ManualClock
from tandem.core.ids import Attempt, BlockId, GroupId, Incarnation, Rank, RequestId, TransferId, WorkerId
from tandem.core.kv_layout import KVGroupSpec, KVLayout
from tandem.kvtransfer.events import ReceiverEvent
from tandem.kvtransfer.frame import Frame, FrameKind
from tandem.kvtransfer.host_id import host_id
from tandem.kvtransfer.kv_pool_access import HostPool, payload_bytes
from tandem.kvtransfer.receiver_core import ReceiverCore
from tandem.kvtransfer.ticket import GroupBlocks, Ticket
from tandem.kvtransfer.transports.base import Peer

DENSE = KVGroupSpec(
    group=GroupId(0), layers=(0, 2, 3), planes=2, heads=4, width=2, block_tokens=4, dtype="float16", window=None
)
LATENT = KVGroupSpec(
    group=GroupId(1), layers=(1, 4), planes=1, heads=1, width=3, block_tokens=4, dtype="float32", is_replicated=True
)
SENDER, RECEIVER = Incarnation(11), Incarnation(22)


class Bench:
    """An intake of two groups with 8 blocks each, and frames made to fit it."""

    def __init__(self) -> None:
        self.memory = {spec.group: bytearray(8 * spec.block_bytes()) for spec in (DENSE, LATENT)}
        self.pools = {spec.group: HostPool(spec, 1, memoryview(self.memory[spec.group])) for spec in (DENSE, LATENT)}
        self.clock = ManualClock(100.0)
        self.events: list[ReceiverEvent] = []
        self.intake = ReceiverCore(
            incarnation=RECEIVER, rank=Rank(0), pools=self.pools, on_event=self.events.append, clock=self.clock
        )
        self.link = self.connect()
        self._bytes = random.Random(7)

    def connect(self, host: str = "") -> Any:
        peer = Peer(worker=WorkerId("p0"), incarnation=SENDER, rank=Rank(0), host=host or host_id())
        return self.intake.connect(peer)

    def ticket(self, transfer: int = 1, groups: dict[int, tuple[int, ...]] | None = None, attempt: int = 1) -> Ticket:
        chosen = {0: (1, 2), 1: (5,)} if groups is None else groups
        return Ticket(
            transfer=TransferId(transfer),
            request=RequestId("r"),
            attempt=Attempt(attempt),
            sender=WorkerId("p0"),
            sender_incarnation=SENDER,
            receiver=WorkerId("d0"),
            receiver_incarnation=RECEIVER,
            groups=tuple(
                GroupBlocks(group=GroupId(g), skip=0, blocks=tuple(map(BlockId, blocks)))
                for g, blocks in chosen.items()
            ),
            endpoints=(),
            layout=KVLayout(groups=(DENSE, LATENT)),
        )

    def data(self, group: int, blocks: tuple[int, ...], layers: range, heads: range, **changes: Any) -> Any:
        """(frame, payload) with random content for transfer 1, attempt 1."""
        spec = (DENSE, LATENT)[group]
        payload = self._bytes.randbytes(payload_bytes(spec, len(blocks), layers, heads))
        fields: dict[str, Any] = {
            "kind": FrameKind.DATA,
            "group": GroupId(group),
            "blocks": tuple(map(BlockId, blocks)),
            "layers": layers,
            "heads": heads,
            "payload_bytes": len(payload),
            "payload_crc": zlib.crc32(payload),
            "send_ns": int(self.clock.now_s() * 1e9),
        }
        return control(**(fields | changes)), payload

    def everything(self) -> list[Any]:
        """Frames that cover the default ticket exactly."""
        return [
            self.data(0, (1,), range(3), range(4)),
            self.data(0, (2,), range(2), range(4)),
            self.data(0, (2,), range(2, 3), range(1)),
            self.data(0, (2,), range(2, 3), range(1, 4)),
            self.data(1, (5,), range(2), range(1)),
        ]

    def send(self, frame: Frame, payload: bytes = b"", link: Any = None) -> Any:
        return self.intake.accept(frame, memoryview(payload), link or self.link)

    def send_all(self, frames: Any = None) -> None:
        """Send these frames, or all that the default ticket needs."""
        for frame, payload in self.everything() if frames is None else frames:
            self.send(frame, payload)

    def image(self) -> tuple[bytes, ...]:
        return tuple(bytes(data) for data in self.memory.values())

    def promised_only(self, before: tuple[bytes, ...], after: tuple[bytes, ...]) -> bool:
        """True if two images differ in no block but those of the default ticket."""
        for spec, old, new, promised in zip((DENSE, LATENT), before, after, ({1, 2}, {5}), strict=True):
            size = spec.block_bytes()
            changed = {b for b in range(8) if old[b * size : (b + 1) * size] != new[b * size : (b + 1) * size]}
            if not changed <= promised:
                return False
        return True

    def dropped(self, reason: str) -> int:
        return self.intake.counters()[f"dropped_{reason}"]


def control(**changes: Any) -> Frame:
    fields: dict[str, Any] = {
        "kind": FrameKind.OPEN,
        "transfer": TransferId(1),
        "attempt": Attempt(1),
        "source_incarnation": SENDER,
        "dest_incarnation": RECEIVER,
        "source_rank": Rank(0),
        "source_ranks": 1,
        "dest_rank": Rank(0),
    }
    return Frame(**(fields | changes))


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture
def specs() -> tuple[KVGroupSpec, KVGroupSpec]:
    return DENSE, LATENT
