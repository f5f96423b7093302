"""GPTQ (Frantar et al. 2022) as AutoGPTQ and GPTQModel store it: 2, 3, 4 or 8 bits with a scale and a zero for groups.

    qweight int32 [inputs · bits / 32, outputs], qzeros int32 [groups, outputs · bits / 32], scales [groups, outputs],
    g_idx int32 [inputs], the group of each input, where they are in an order of their own
    weight = (q - (zero + 1)) · scale, or (q - zero) · scale in the second version of the format

Numbers lie densely, lowest bits first, so that those of 3 bits may be in two words. GPTQModel has written zeros of the
second version under the first one's name; where numbers are symmetric, their value tells.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tandem.engine.checkpoint_formats.interface import StoredSlice, check_shape, matrix_shape, need, packed_weights
from tandem.engine.config_fields import Fields

if TYPE_CHECKING:
    from torch import Tensor

_BITS = (2, 3, 4, 8)
_VERSIONS = {"gptq": 1, "gptq_v2": 2}


@dataclass(frozen=True, slots=True)
class Gptq:
    """`group`: inputs that share a scale, None = all; `dynamic`: patterns of modules with settings of their own."""

    bits: int
    group: int | None
    is_symmetric: bool
    version: int
    dynamic: tuple[tuple[str, Gptq], ...] = ()

    @property
    def words(self) -> str:
        return f"GPTQ, {self.bits} bits in groups of {self.group or 'all inputs'}"

    def weights(self, keys: Collection[str]) -> dict[str, dict[str, str]]:
        return packed_weights(keys, "qweight", ("qzeros", "scales", "g_idx"))

    def is_unused(self, key: str) -> bool:
        return False

    def open(self, key: str, parts: Mapping[str, StoredSlice]) -> StoredSlice:
        for pattern, other in self.dynamic:
            if re.match(pattern, key.removesuffix(".weight")):
                return other.open(key, parts)
        from tandem.engine.checkpoint_formats.packed_numbers import PackedMatrix, finite, places, unpack_dense

        bits, (weight, zeros, scales) = self.bits, need(parts, "qweight", "qzeros", "scales")
        words, outputs = matrix_shape("qweight", weight)
        inputs = words * 32 // bits
        group = self.group or inputs
        groups = -(-inputs // group)
        check_shape("qzeros", zeros, [groups, -(-outputs * bits // 32)])
        check_shape("scales", scales, [groups, outputs])
        order = None
        if "g_idx" in parts:
            check_shape("g_idx", parts["g_idx"], [inputs])
            order = parts["g_idx"][:].long()
            if not bool(((order >= 0) & (order < groups)).all()):
                raise ValueError(f"its g_idx names groups beyond {groups}")
        every = unpack_dense(zeros[:], bits, slice(0, outputs))
        if self.version == 1 and not (self.is_symmetric and bool((every == 1 << (bits - 1)).all())):
            every = every + 1

        def read(rows: slice, columns: slice) -> Tensor:
            of = places(columns, group) if order is None else order[columns]
            q = unpack_dense(weight[:, rows].T, bits, columns)
            return (q - every[:, rows].T[:, of]).float().mul_(finite(scales[:, rows]).T[:, of])

        return PackedMatrix((outputs, inputs), read)


def read(fields: Fields) -> Gptq:
    """Raises ModelError for another variant."""
    name = str(fields.get("checkpoint_format") or "gptq")
    if name not in _VERSIONS:
        raise fields.error(f"GPTQ weights of the format {name} are not supported", todo="use gptq or gptq_v2")
    plain = _settings(fields, Gptq(4, 128, is_symmetric=True, version=_VERSIONS[name]))
    rules: Any = fields.get("dynamic") or {}
    if not isinstance(rules, dict) or not all(isinstance(one, dict) for one in rules.values()):
        raise fields.error(f"dynamic is {rules!r}", why="it must give settings by patterns of modules")
    dynamic = []
    for pattern, settings in rules.items():
        if pattern.startswith("-:"):  # such modules are not quantised
            continue
        try:
            re.compile(pattern.removeprefix("+:"))
        except re.error as error:
            raise fields.error(f"the pattern {pattern!r} in dynamic is not valid", why=str(error)) from error
        dynamic.append((pattern.removeprefix("+:"), _settings(Fields(settings, fields.path), plain)))
    return replace(plain, dynamic=tuple(dynamic))


def _settings(fields: Fields, default: Gptq) -> Gptq:
    bits = fields.positive("bits", default=default.bits)
    if bits not in _BITS:
        raise fields.error(f"GPTQ weights of {bits} bits are not supported", todo=f"use {', '.join(map(str, _BITS))}")
    group = default.group
    if (size := fields.get("group_size")) is not None:
        group = None if size == -1 else fields.positive("group_size")
    is_symmetric = fields.flag("sym", default=default.is_symmetric)
    return Gptq(bits, group, is_symmetric=is_symmetric, version=default.version)
