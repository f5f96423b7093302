"""bitsandbytes (Dettmers et al. 2022, 2023): NF4 or FP4 in blocks of neighbouring numbers, and LLM.int8.

4 bits   weight uint8 [numbers / 2, 1], upper half first, row by row; weight.absmax [blocks], weight.quant_map [16], and
         weight.quant_state.bitsandbytes__nf4, JSON in bytes: shape, blocksize
         weight = quant_map[number] · absmax
         absmax in 8 bits: weight.nested_quant_map[number] · weight.nested_absmax of 256 + nested_offset
8 bits   weight int8 [outputs, inputs], SCB fp32 [outputs]: weight = number · SCB / 127
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tandem.engine.checkpoint_formats.interface import StoredSlice, check_shape, matrix_shape, need
from tandem.engine.config_fields import Fields

if TYPE_CHECKING:
    from torch import Tensor

_STATES = tuple(f"quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", *_STATES)
_OF_127 = 7.874015718698502e-3  # the library multiplies by it
_STATE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class BitsAndBytes:
    bits: int

    @property
    def words(self) -> str:
        return f"bitsandbytes, {self.bits} bits"

    def weights(self, keys: Collection[str]) -> dict[str, dict[str, str]]:
        found = {}
        for key in keys:
            scales = key.removesuffix("weight") + "SCB"
            if key + ".absmax" in keys:
                found[key] = {"weight": key, **{part: f"{key}.{part}" for part in _PARTS if f"{key}.{part}" in keys}}
            elif key.endswith(".weight") and scales in keys:
                found[key] = {"weight": key, "SCB": scales}
        return found

    def is_unused(self, key: str) -> bool:
        return key.endswith(".weight_format")

    def open(self, key: str, parts: Mapping[str, StoredSlice]) -> StoredSlice:
        return _bytes(*need(parts, "weight", "SCB")) if "SCB" in parts else _halves(parts)


def _bytes(weight: StoredSlice, scales: StoredSlice) -> StoredSlice:
    from tandem.engine.checkpoint_formats.packed_numbers import PackedMatrix, finite, one_byte

    outputs, inputs = matrix_shape("weight", weight)
    check_shape("SCB", scales, [outputs])

    def read(rows: slice, columns: slice) -> Tensor:
        return one_byte(weight[rows, columns]).mul_(finite(scales[rows])[:, None]).mul_(_OF_127)

    return PackedMatrix((outputs, inputs), read)


def _halves(parts: Mapping[str, StoredSlice]) -> StoredSlice:
    import torch

    from tandem.engine.checkpoint_formats.packed_numbers import PackedMatrix, expect, finite, places

    state = _state(parts)
    shape, block = state.get("shape"), state.get("blocksize")
    if not isinstance(shape, list) or len(shape) != 2 or not all(type(size) is int and size > 0 for size in shape):
        raise ValueError(f"its state has the shape {shape!r}")
    if type(block) is not int or block < 1:
        raise ValueError(f"its state has the block size {block!r}")
    weight, absmax, codes = need(parts, "weight", "absmax", "quant_map")
    (outputs, inputs), bytes_of = shape, -(-shape[0] * shape[1] // 2)
    blocks = -(-outputs * inputs // block)
    check_shape("weight", weight, [bytes_of, 1], [1, bytes_of])
    check_shape("absmax", absmax, [blocks])
    check_shape("quant_map", codes, [16])
    table, scales, flat = finite(codes[:]), _scales(absmax, parts, state), expect(weight[:], torch.uint8).reshape(-1)

    def read(rows: slice, columns: slice) -> Tensor:
        begin, end = rows.start * inputs, rows.stop * inputs
        both = flat[begin // 2 : -(-end // 2)]
        fields = torch.stack((both >> 4, both & 15), 1).flatten()[begin % 2 : begin % 2 + end - begin]
        of = places(slice(begin, end), block)
        return table[fields.long()].mul_(scales[of]).view(-1, inputs)[:, columns]

    return PackedMatrix((outputs, inputs), read)


def _state(parts: Mapping[str, StoredSlice]) -> dict[str, Any]:
    stored = next((parts[name] for name in _STATES if name in parts), None)
    if stored is None or len(stored.get_shape()) != 1 or stored.get_shape()[0] > _STATE_BYTES:
        raise ValueError("its quant_state is missing")
    try:
        found = json.loads(bytes(stored[:].tolist()))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"its quant_state is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError("its quant_state is not an object")
    return found


def _scales(absmax: StoredSlice, parts: Mapping[str, StoredSlice], state: Mapping[str, Any]) -> Tensor:
    from tandem.engine.checkpoint_formats.packed_numbers import finite

    if "nested_absmax" not in parts:
        return finite(absmax[:])
    nested, codes = need(parts, "nested_absmax", "nested_quant_map")
    (count,), block, offset = absmax.get_shape(), state.get("nested_blocksize"), state.get("nested_offset")
    if type(block) is not int or block < 1 or not isinstance(offset, int | float):
        raise ValueError(f"its state has the nested block size {block!r} and the offset {offset!r}")
    check_shape("nested_absmax", nested, [-(-count // block)])
    check_shape("nested_quant_map", codes, [256])
    spread = finite(nested[:]).repeat_interleave(min(block, max(1, count)))[:count]
    return finite(finite(codes[:])[absmax[:].long()] * spread + offset)


def read(fields: Fields) -> BitsAndBytes:
    """Raises ModelError for settings that contradict each other."""
    kinds = [bits for bits in (4, 8) if fields.flag(f"load_in_{bits}bit", default=False)]
    if len(kinds) != 1:
        raise fields.error(
            "one of load_in_4bit and load_in_8bit must be true", todo="use the model's complete config.json"
        )
    return BitsAndBytes(kinds[0])
