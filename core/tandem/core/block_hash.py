"""Block hashes: 128-bit SHA-256 chains over token ids. Router and workers compute the same ones; never Python hash().

hash(block i) = SHA-256(hash(block i-1) ‖ token ids as little-endian u32)[:16], hash(block -1) = root(…).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType

from tandem.core import token_ids

BlockHash = NewType("BlockHash", bytes)
HASH_VERSION = 1
HASH_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class HashRoot:
    """Start of a chain of block hashes; two chains are comparable only if their roots are equal.

    `fingerprint` names the model exactly (see Fingerprint), `salt` separates tenants, `lossy` names a codec or
    conversion that changed the bytes (empty for exact blocks).
    """

    fingerprint: str
    block_tokens: int
    salt: bytes = b""
    lossy: str = ""

    def digest(self) -> BlockHash:
        """16 bytes; every field is length-prefixed so that no two roots collide by concatenation."""
        sha = hashlib.sha256()
        parts = (str(HASH_VERSION).encode(), self.fingerprint.encode(), str(self.block_tokens).encode(), self.salt)
        for part in (*parts, self.lossy.encode()):
            sha.update(len(part).to_bytes(4, "little"))
            sha.update(part)
        return BlockHash(sha.digest()[:HASH_BYTES])


def next_hash(parent: BlockHash, tokens: Sequence[int]) -> BlockHash:
    """The hash of one full block of `tokens` behind `parent`."""
    return BlockHash(hashlib.sha256(parent + token_ids.pack(tokens)).digest()[:HASH_BYTES])


def chain(
    root: BlockHash, tokens: Sequence[int], block_tokens: int, known: Sequence[BlockHash] = ()
) -> list[BlockHash]:
    """Hashes of every *full* block of `tokens`, first to last; a partial tail block has none.

    `known`: the first of them, computed before; only the rest is computed.
    """
    hashes = list(known)
    data = memoryview(token_ids.pack(tokens[len(hashes) * block_tokens :]))
    size = 4 * block_tokens
    parent = hashes[-1] if hashes else root
    for start in range(0, len(data) - size + 1, size):
        parent = BlockHash(hashlib.sha256(parent + data[start : start + size]).digest()[:HASH_BYTES])
        hashes.append(parent)
    return hashes
