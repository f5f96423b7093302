"""The receiving worker of the wire part: TransferReceivers of all its ranks, and observations for the judge."""

from __future__ import annotations

import queue
import threading
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from proof.transfer.plan import Setting
from proof.transfer.sender_process import SECRET
from proof.transfer.shapes import NUM_BLOCKS, drawn, in_blocks, specs_of, view
from tandem.core.clock import MonotonicClock
from tandem.core.ids import BlockId, GroupId, Incarnation, Rank
from tandem.core.kv_layout import KVGroupSpec, KVLayout
from tandem.kvtransfer.kv_pool_access import HostPool
from tandem.kvtransfer.receiver import TransferReceiver
from tandem.kvtransfer.ticket import GroupBlocks


class WatchedPool(HostPool):
    """Reports every write before it is done, and counts bytes."""

    written = 0
    on_write: Callable[[GroupId, Sequence[BlockId]], None] = staticmethod(lambda group, blocks: None)

    def write_from(self, blocks: Sequence[BlockId], layers: range, heads: range, payload: memoryview) -> int:
        self.on_write(self.spec.group, blocks)
        self.written += len(payload)
        return super().write_from(blocks, layers, heads, payload)


class ReceivingWorker:
    """`events` gets (rank, event) from every rank."""

    def __init__(self, setting: Setting, incarnation: Incarnation, folder: Path) -> None:
        self.specs, self.tp = specs_of(setting.shape, setting.dest_tokens), setting.dest_tp
        self.layout = KVLayout(groups=self.specs, tp=self.tp)
        self.events: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self.memory = [
            {spec.group: bytearray(NUM_BLOCKS * spec.block_bytes(self.tp)) for spec in self.specs}
            for _ in range(self.tp)
        ]
        self.pools = [
            {s.group: WatchedPool(s, self.tp, memoryview(memory[s.group])) for s in self.specs}
            for memory in self.memory
        ]
        self.receivers = [self._receiver(rank, setting.transport, incarnation, folder) for rank in range(self.tp)]
        for receiver in self.receivers:
            receiver.start()

    def _receiver(self, rank: int, transport: str, incarnation: Incarnation, folder: Path) -> TransferReceiver:
        return TransferReceiver(
            incarnation=incarnation, rank=Rank(rank), pools=self.pools[rank], secret=SECRET,
            on_event=lambda event: self.events.put((rank, event)), clock=MonotonicClock(), runtime_dir=folder,
            transports=(transport,),
        )  # fmt: skip

    def watch(self, on_write: Callable[[GroupId, Sequence[BlockId]], None]) -> None:
        for pools in self.pools:
            for pool in pools.values():
                pool.on_write = on_write

    def images(self) -> list[dict[GroupId, bytes]]:
        return [{group: bytes(data) for group, data in memory.items()} for memory in self.memory]

    def changed_blocks(self, before: list[dict[GroupId, bytes]]) -> set[tuple[GroupId, int]]:
        """Blocks of any rank that have changed."""
        changed = set()
        for rank, memory in enumerate(self.memory):
            for spec in self.specs:
                now, then = memory[spec.group], before[rank][spec.group]
                if now != then:
                    size = spec.block_bytes(self.tp)
                    changed |= {
                        (spec.group, block)
                        for block in range(NUM_BLOCKS)
                        if now[block * size : (block + 1) * size] != then[block * size : (block + 1) * size]
                    }
        return changed

    def wrong_blocks(self, rank: int, groups: Iterable[GroupBlocks], contents: dict[GroupId, Any]) -> int:
        """Number of promised blocks of a rank with wrong content."""
        wrong = 0
        for promised, spec in zip(groups, self.specs, strict=True):
            if promised.blocks:
                held = view(self.memory[rank][spec.group], spec, self.tp)[np.asarray(promised.blocks)]
                content = contents[spec.group]
                expected = in_blocks(content, spec, self.tp, rank, promised.skip, len(promised.blocks))
                wrong += int((held != expected).reshape(len(promised.blocks), -1).any(axis=1).sum())
        return wrong

    def digest(self, rank: int, groups: Iterable[GroupBlocks]) -> int:
        """A checksum over promised blocks as they are now."""
        crc = 0
        for promised, spec in zip(groups, self.specs, strict=True):
            size, memory = spec.block_bytes(self.tp), memoryview(self.memory[rank][spec.group])
            for block in promised.blocks:
                crc = zlib.crc32(memory[block * size : (block + 1) * size], crc)
        return crc

    @property
    def open_transfers(self) -> int:
        return sum(receiver.counters()["open"] for receiver in self.receivers)

    def close(self) -> None:
        for receiver in self.receivers:
            receiver.close()


def contents_of(seed: str, setting: Setting, specs: Sequence[KVGroupSpec], tokens: int) -> dict[GroupId, Any]:
    """Content of the sender's blocks for this transfer, in tokens up to the end of its last block."""
    whole = -(-tokens // setting.source_tokens) * setting.source_tokens
    return {spec.group: drawn(seed, spec, whole) for spec in specs}


class Canceller:
    """Cancels transfers at all ranks from a thread of its own, which a transport's thread may not do."""

    def __init__(self, cancel: Callable[[int], None]) -> None:
        self._cancel = cancel
        self._wanted: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="canceller", daemon=True)
        self._thread.start()

    def put(self, transfer: int) -> None:
        self._wanted.put(transfer)

    def close(self) -> None:
        """Wait until all requested cancels are done."""
        self._wanted.put(None)
        self._thread.join(60)

    def _run(self) -> None:
        while (transfer := self._wanted.get()) is not None:
            self._cancel(transfer)
