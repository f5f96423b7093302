"""FP8 (e4m3) with a scale for the whole matrix, for each output, or for blocks (DeepSeek-V3, section 3.3.2).

weight e4m3 [outputs, inputs], weight_scale [] or [outputs, 1], or weight_scale_inv [outputs / rows, inputs / columns]
weight = number · scale; scales of blocks are rounded up in their number, and are no inverses
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tandem.engine.checkpoint_formats.interface import StoredSlice, check_shape, matrix_shape, need
from tandem.engine.config_fields import Fields

if TYPE_CHECKING:
    from torch import Tensor

_OF_BLOCKS, _OF_OUTPUTS = "weight_scale_inv", "weight_scale"


@dataclass(frozen=True, slots=True)
class Fp8:
    """`blocks`: rows and columns that share a scale; None = those of an output, or all."""

    blocks: tuple[int, int] | None

    @property
    def words(self) -> str:
        return "FP8" if self.blocks is None else f"FP8 in blocks of {self.blocks[0]} x {self.blocks[1]}"

    def weights(self, keys: Collection[str]) -> dict[str, dict[str, str]]:
        behind = "_scale" if self.blocks is None else "_scale_inv"
        return {key: {"weight": key, "scale": key + behind} for key in keys if key + behind in keys}

    def is_unused(self, key: str) -> bool:
        return key.endswith((".input_scale", ".activation_scale", ".k_scale", ".v_scale"))

    def open(self, key: str, parts: Mapping[str, StoredSlice]) -> StoredSlice:
        weight, scale = need(parts, "weight", "scale")
        return scaled_matrix(weight, scale, self.blocks)


def scaled_matrix(weight: StoredSlice, scale: StoredSlice, blocks: tuple[int, int] | None) -> StoredSlice:
    """Numbers of one byte with scales of blocks, of outputs, or of all. Raises ValueError where these do not fit."""
    from tandem.engine.checkpoint_formats.packed_numbers import PackedMatrix, finite, one_byte, places, whole

    outputs, inputs = matrix_shape("weight", weight)
    rows_a_scale, columns_a_scale = blocks or (1, max(1, inputs))
    wanted = [-(-outputs // rows_a_scale), -(-inputs // columns_a_scale)]
    if blocks is None:
        check_shape("scale", scale, [outputs, 1], [outputs], [1], [1, 1], [])
    else:
        check_shape("scale", scale, wanted)
    scales = finite(whole(scale))
    scales = scales.reshape(wanted) if scales.numel() > 1 or blocks is not None else scales.expand(wanted[0], 1)

    def read(rows: slice, columns: slice) -> Tensor:
        spread = scales[places(rows, rows_a_scale)][:, places(columns, columns_a_scale)]
        return one_byte(weight[rows, columns]).mul_(spread)

    return PackedMatrix((outputs, inputs), read)


def read(fields: Fields) -> Fp8:
    """Raises ModelError for another variant."""
    if fields.get("fmt") not in (None, "e4m3"):
        raise fields.error(f"fp8 weights of the format {fields.get('fmt')} are not supported", todo="use e4m3")
    blocks = fields.get("weight_block_size")
    if blocks is None:
        return Fp8(None)
    if not isinstance(blocks, list) or len(blocks) != 2 or not all(type(one) is int and one > 0 for one in blocks):
        raise fields.error(
            f"weight_block_size is {blocks!r}", why="it must be the rows and columns that share a scale",
            todo="use the model's complete config.json",
        )  # fmt: skip
    return Fp8((blocks[0], blocks[1]))
