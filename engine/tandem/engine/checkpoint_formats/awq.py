"""AWQ (Lin et al. 2023) as AutoAWQ stores it, `version` gemm: 4 bits with a scale and a zero for groups of inputs.

    qweight int32 [inputs, outputs / 8], qzeros int32 [groups, outputs / 8], scales fp16 [groups, outputs]
    weight = (q - zero) · scale

A word has eight neighbouring outputs, in the order of `_PLACES`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tandem.engine.checkpoint_formats.interface import StoredSlice, check_shape, matrix_shape, need, packed_weights
from tandem.engine.config_fields import Fields

if TYPE_CHECKING:
    from torch import Tensor

_BITS, _FIELDS = 4, 8
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Of each of eight outputs, the 4 bits of the word that it is in."""


@dataclass(frozen=True, slots=True)
class Awq:
    """`group`: inputs that share a scale; None = all."""

    group: int | None

    @property
    def words(self) -> str:
        return f"AWQ, 4 bits in groups of {self.group or 'all inputs'}"

    def weights(self, keys: Collection[str]) -> dict[str, dict[str, str]]:
        return packed_weights(keys, "qweight", ("qzeros", "scales"))

    def is_unused(self, key: str) -> bool:
        return False

    def open(self, key: str, parts: Mapping[str, StoredSlice]) -> StoredSlice:
        from tandem.engine.checkpoint_formats.packed_numbers import PackedMatrix, finite, places

        weight, zeros, scales = need(parts, "qweight", "qzeros", "scales")
        inputs, words = matrix_shape("qweight", weight)
        group = self.group or inputs
        check_shape("qzeros", zeros, [-(-inputs // group), words])
        check_shape("scales", scales, [-(-inputs // group), words * _FIELDS])

        def read(rows: slice, columns: slice) -> Tensor:
            some = slice(rows.start // _FIELDS, -(-rows.stop // _FIELDS))
            mine = slice(rows.start - some.start * _FIELDS, rows.stop - some.start * _FIELDS)
            of = places(columns, group)
            q, zero = _fields(weight[columns, some])[:, mine], _fields(zeros[:, some])[:, mine]
            return (q - zero[of]).mul_(finite(scales[:, rows])[of]).T

        return PackedMatrix((words * _FIELDS, inputs), read)


def _fields(words: Tensor) -> Tensor:
    """[n, words] to fp32 [n, 8 · words]."""
    import torch

    from tandem.engine.checkpoint_formats.packed_numbers import expect

    expect(words, torch.int32)
    shifts = words.new_tensor([_BITS * place for place in _PLACES])
    return (words[:, :, None] >> shifts).bitwise_and_(15).flatten(1).float()


def read(fields: Fields) -> Awq:
    """Raises ModelError for another variant."""
    version = str(fields.get("version") or "gemm").lower()
    if version != "gemm":
        raise fields.error(f"AWQ weights of the version {version} are not supported", todo="use the version gemm")
    bits = fields.positive("bits", default=_BITS) if fields.get("w_bit") is None else fields.positive("w_bit")
    if bits != _BITS or not fields.flag("zero_point", default=True):
        raise fields.error(
            "AWQ weights must have 4 bits and zero points", todo="use such a checkpoint, or plain weights"
        )
    size = fields.get("group_size") if fields.get("group_size") is not None else fields.get("q_group_size")
    return Awq(None if size == -1 else Fields({"group_size": size}, fields.path).positive("group_size", default=128))
