"""One KV group's pool on one rank, seen as bytes: gather slices of blocks out of it, scatter them back into it.

Knows the layout of `tandem.core.kv_layout` and nothing of transfers. Blocks, layers and heads are indices local to the
pool: layer 0 is the group's first layer, head 0 the first head that this rank holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from tandem.core.ids import BlockId
from tandem.core.kv_layout import KVGroupSpec
from tandem.kernels import kv_payload
from tandem.kernels.kv_payload import is_within

__all__ = ["DeviceAccess", "HostPool", "PoolAccess", "TokenRun", "is_within", "payload_bytes"]


@dataclass(frozen=True, slots=True)
class TokenRun:
    """The tokens of `blocks`, one after another, from the token `offset_tokens` of the first block on.

    `tokens`: so many of them are valid; what follows is whatever the block held before. None = all.
    """

    blocks: tuple[BlockId, ...]
    block_tokens: int
    offset_tokens: int = 0
    tokens: int | None = None

    def reaches(self, targets: int, target_tokens: int) -> bool:
        """True if the run spans `targets` blocks: each of its blocks gives a token, and the last target gets one."""
        if not 0 <= self.offset_tokens < self.block_tokens:
            return False
        if not self.blocks or not targets:
            return len(self.blocks) == targets
        held, wanted = len(self.blocks) * self.block_tokens - self.offset_tokens, targets * target_tokens
        return wanted - target_tokens < held < wanted + self.block_tokens

    def cut(self, first: int, tokens: int) -> TokenRun:
        """`tokens` tokens from the token `first` of the run on, or as many of them as there are."""
        start = self.offset_tokens + first
        index, offset = divmod(start, self.block_tokens)
        blocks = self.blocks[index : -(-(start + tokens) // self.block_tokens)]
        rest = None if self.tokens is None else max(0, self.tokens - first)
        return TokenRun(blocks, self.block_tokens, offset if blocks else 0, rest)


class PoolAccess(Protocol):
    """Byte access to a pool, from transfer threads. A payload is `[blocks, layers, planes, heads, tokens, width]`.

    Every method returns the CRC-32 (as `zlib.crc32`) of the payload that it moved, and raises ValueError, before a byte
    has moved, for an index or a size that does not fit.
    """

    @property
    def spec(self) -> KVGroupSpec: ...

    @property
    def tp(self) -> int: ...

    def read_into(self, blocks: Sequence[BlockId], layers: range, heads: range, out: memoryview) -> int:
        """Gather the named slices into `out`, which has exactly their size.

        The slices must not be written meanwhile: a checksum that does not fit what was copied would fail the attempt.
        """
        ...

    def read_tokens_into(
        self, source: TokenRun, layers: range, heads: range, out: memoryview, *, target_tokens: int
    ) -> int:
        """Gather the tokens of a run, cut anew into blocks of `target_tokens`; zeros follow the last source block.

        `out` holds a whole number of such blocks.
        """
        ...

    def write_from(self, blocks: Sequence[BlockId], layers: range, heads: range, payload: memoryview) -> int:
        """Scatter `payload`, which has exactly the slices' size."""
        ...


@runtime_checkable
class DeviceAccess(PoolAccess, Protocol):
    """A pool in a device's memory that also gives and takes payloads there: `out` and `payload` are uint8 tensors of
    exactly the payload's size on that device, of one dimension, contiguous, at an address that fits the dtype.

    Work is queued on the calling thread's current stream, and a gather behind what the device's default stream holds.
    Errors as in PoolAccess; no checksum is taken.
    """

    @property
    def device(self) -> str:
        """As torch names it."""
        ...

    def gather_into(self, source: TokenRun, layers: range, heads: range, out: Any, *, target_tokens: int) -> None:
        """Gather the tokens of a run, cut into blocks of `target_tokens`."""
        ...

    def scatter_from(self, blocks: Sequence[BlockId], layers: range, heads: range, payload: Any) -> None:
        """Scatter whole blocks."""
        ...


class HostPool:
    """A pool in host memory; `data` is the whole of it, borrowed for this object's life, contiguous.

    Thread-safe as far as two calls touch different slices. Making one loads the native library, or builds it.
    """

    def __init__(self, spec: KVGroupSpec, tp: int, data: memoryview) -> None:
        self._data = data.cast("B")
        self.spec, self.tp = spec, tp
        block_bytes = spec.block_bytes(tp)
        if len(self._data) % block_bytes:
            raise ValueError(f"{len(self._data)} bytes are not a whole number of {block_bytes}-byte blocks")
        self.num_blocks = len(self._data) // block_bytes
        self._shape = kv_payload.PoolShape(
            num_blocks=self.num_blocks,
            layers=len(spec.layers),
            planes=spec.planes,
            heads=spec.heads_local(tp),
            block_tokens=spec.block_tokens,
            row_bytes=spec.head_bytes() // spec.block_tokens,
        )
        kv_payload.prepare()

    def read_into(self, blocks: Sequence[BlockId], layers: range, heads: range, out: memoryview) -> int:
        """Gather into `out`."""
        return kv_payload.gather(self._data, self._shape, blocks, layers, heads, out)

    def read_tokens_into(
        self, source: TokenRun, layers: range, heads: range, out: memoryview, *, target_tokens: int
    ) -> int:
        """Gather into `out`, re-blocked."""
        if source.block_tokens != self.spec.block_tokens:
            raise ValueError(f"blocks of {source.block_tokens} tokens in a pool of {self.spec.block_tokens}")
        return kv_payload.reblock(
            self._data, self._shape, source.blocks, layers, heads, out,
            offset_tokens=source.offset_tokens, target_tokens=target_tokens,
        )  # fmt: skip

    def write_from(self, blocks: Sequence[BlockId], layers: range, heads: range, payload: memoryview) -> int:
        """Scatter `payload`."""
        return kv_payload.scatter(self._data, self._shape, blocks, layers, heads, payload)


def payload_bytes(spec: KVGroupSpec, blocks: int, layers: range, heads: range) -> int:
    """Bytes of a slice: blocks × layers × planes × heads × head bytes."""
    return blocks * len(layers) * spec.planes * len(heads) * spec.head_bytes()
