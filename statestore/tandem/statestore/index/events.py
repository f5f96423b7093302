"""Block events between a worker's prefix cache and the index, and their form in Redis.

A *member* is one byte of group and 16 bytes of hash. A stream entry holds the members that were stored and removed,
concatenated, whether everything before is void, and the state after it as a check.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from tandem.core.block_hash import HASH_BYTES, BlockHash

MEMBER_BYTES: Final = 1 + HASH_BYTES
MAX_GROUPS: Final = 256


class BlockChange(StrEnum):
    """STORED: can be found by hash from now on. REMOVED: no longer. CLEARED: the worker holds nothing of any group."""

    STORED = "stored"
    REMOVED = "removed"
    CLEARED = "cleared"


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """One change in the prefix cache of a worker; `group` is the KV group (0 … 255)."""

    change: BlockChange
    hashes: tuple[BlockHash, ...] = ()
    group: int = 0


class Position(NamedTuple):
    """Last published position of a worker: sequence number, blocks held, xor digest over them. Heartbeats carry it."""

    seq: int
    blocks: int
    digest: int

    def check(self) -> bytes:
        """Blocks and digest as they stand in a stream entry."""
        return b"%d:%x" % (self.blocks, self.digest)


NOTHING: Final = Position(0, 0, 0)
"""Position before the first entry."""


def member(group: int, block: BlockHash) -> bytes:
    """The block as a member of the set; ValueError when it is not one byte of group and 16 of hash."""
    if len(block) != HASH_BYTES:
        raise ValueError(f"a block hash has {HASH_BYTES} bytes, not {len(block)}")
    return group.to_bytes(1, "little") + block if 0 <= group < MAX_GROUPS else _refuse(group)


def members(blob: bytes) -> Iterator[tuple[int, BlockHash]]:
    """(group, hash) of every member in a concatenation."""
    for start in range(0, len(blob), MEMBER_BYTES):
        yield blob[start], BlockHash(blob[start + 1 : start + MEMBER_BYTES])


def fold(digest: int, member_list: Iterable[bytes]) -> int:
    """Fold members in or out of a digest. The shift keeps the same hash in two groups from cancelling itself out."""
    for item in member_list:
        digest ^= int.from_bytes(item[1:], "little") << item[0]
    return digest


def _refuse(group: int) -> bytes:
    raise ValueError(f"KV group {group} is not in 0 … {MAX_GROUPS - 1}")
