"""Wire form of a group's payload: the receiver's geometry and dtype, or a codec over it. No sockets.

A row is one head of one plane of one layer of one block. Without a codec a payload is the rows' numbers in the
receiver's dtype; with one it is a float32 scale a row, all of them first, then a byte a number.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.kv_compatibility import CODECS, Codec
from tandem.core.kv_layout import KVGroupSpec
from tandem.kernels import kv_payload


def codec_named(name: str) -> Codec:
    """The codec of a ticket; raises ValueError for a name that this version does not know."""
    for codec in Codec:
        if codec.label == name:
            return codec
    raise ValueError(f"unknown wire codec {name!r}: expected one of {', '.join(CODECS)}, or none")


@dataclass(frozen=True, slots=True)
class PayloadForm:
    """The form of one group's payloads: `spec` is the receiver's."""

    spec: KVGroupSpec
    codec: Codec = Codec.NONE

    @property
    def row_size(self) -> int:
        """Numbers in a row."""
        return self.spec.block_tokens * self.spec.width

    def payload_bytes(self, blocks: int, layers: range, heads: range) -> int:
        """Bytes of a slice as sent."""
        rows = blocks * len(layers) * self.spec.planes * len(heads)
        return kv_payload.encoded_bytes(rows, self.row_size) if self.codec else rows * self.spec.head_bytes()

    def is_written_as(self, dtype: str) -> bool:
        """True if a pool's numbers of `dtype` travel as they are."""
        return self.codec is Codec.NONE and dtype == self.spec.dtype

    def encode(self, source: memoryview, dtype: str, out: memoryview) -> int:
        """Write numbers of `dtype`, in the receiver's blocks, as a payload; return its CRC-32."""
        if self.codec:
            kv_payload.encode(self.codec.label, source, dtype, out, row_size=self.row_size)
        else:
            kv_payload.convert(source, dtype, out, self.spec.dtype)
        return kv_payload.crc32(out)

    def plain_bytes(self, encoded_bytes: int) -> int:
        """Bytes of a codec's payload of `encoded_bytes` after decoding."""
        return encoded_bytes // kv_payload.encoded_bytes(1, self.row_size) * self.spec.head_bytes()

    def decode(self, payload: memoryview, out: memoryview) -> memoryview:
        """Decode a codec's payload to the receiver's dtype, into `out` of `plain_bytes`, which is returned."""
        kv_payload.decode(self.codec.label, payload, out, self.spec.dtype, row_size=self.row_size)
        return out
