"""compressed-tensors, which llm-compressor writes: whole numbers, FP8 and FP4 with scales, by groups of modules.

    int-quantized, naive-quantized     weight int8 [outputs, inputs]
    float-quantized                    weight e4m3 [outputs, inputs]
    pack-quantized                     weight_packed int32 [outputs, inputs · bits / 32], lowest bits first, of fields
                                       number + 2^(bits - 1); weight_shape has outputs and inputs
    nvfp4-, mxfp4-pack-quantized       weight_packed uint8 [outputs, inputs / 2], lower half first
    weight_scale                       [] or [1], [outputs, 1], [outputs, groups], or of blocks
    weight_zero_point                  as the scales; of packed numbers int32 [outputs · bits / 32, groups]
    weight_g_idx                       int32 [inputs], the group of each

    weight = (number - zero) · scale, of NVFP4 number · (scale / weight_global_scale)

Scales of activations are not read: activations are not quantised.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tandem.engine.checkpoint_formats.fp8 import scaled_matrix
from tandem.engine.checkpoint_formats.interface import StoredSlice, check_shape, matrix_shape, need, packed_weights
from tandem.engine.config_fields import Fields

if TYPE_CHECKING:
    from torch import Tensor

_PLAIN = frozenset({"int-quantized", "float-quantized", "naive-quantized"})
_PACKED, _NVFP4, _MXFP4 = "pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized"
_FORMATS = _PLAIN | {_PACKED, _NVFP4, _MXFP4}
_PARTS = ("weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape", "weight_global_scale")
_UNUSED = ("input_scale", "input_zero_point", "input_global_scale", "output_scale", "k_scale", "v_scale", "q_scale")
_FP4_GROUPS = {_NVFP4: 16, _MXFP4: 32}
_STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_E8M0_BIAS, _E8M0_NAN = 127, 255


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How weights of the modules that `targets` name are stored: by their names, as `re:PATTERN`, or by a class."""

    targets: tuple[str, ...]
    form: str
    bits: int
    group: int | None
    blocks: tuple[int, int] | None

    def is_for(self, module: str) -> bool:
        """By name or pattern."""
        return any(
            re.match(target.removeprefix("re:"), module) if target.startswith("re:") else target == module
            for target in self.targets
        )


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    schemes: tuple[Scheme, ...]

    @property
    def words(self) -> str:
        kinds = dict.fromkeys(f"{scheme.form}, {scheme.bits} bits" for scheme in self.schemes)
        return f"compressed-tensors ({'; '.join(kinds)})"

    def weights(self, keys: Collection[str]) -> dict[str, dict[str, str]]:
        scaled = {key: parts for key, parts in packed_weights(keys, "weight", _PARTS).items() if len(parts) > 1}
        return packed_weights(keys, "weight_packed", _PARTS) | scaled

    def is_unused(self, key: str) -> bool:
        return key.rpartition(".")[2] in _UNUSED

    def open(self, key: str, parts: Mapping[str, StoredSlice]) -> StoredSlice:
        module = key.removesuffix(".weight")
        named = (scheme for scheme in self.schemes if scheme.is_for(module))
        scheme = next(named, None) or next((one for one in self.schemes if "Linear" in one.targets), None)
        if scheme is None:
            raise ValueError("no group in config_groups names it")
        if "weight_packed" not in parts:
            return _plain(scheme, parts)
        return _packed(scheme, parts) if scheme.form == _PACKED else _fp4(scheme, parts)


def _plain(scheme: Scheme, parts: Mapping[str, StoredSlice]) -> StoredSlice:
    from tandem.engine.checkpoint_formats.packed_numbers import PackedMatrix, one_byte, whole

    weight, scale = need(parts, "weight", "weight_scale")
    zeros = whole(parts["weight_zero_point"]).float() if "weight_zero_point" in parts else None
    if scheme.group is None and (zeros is None or not bool(zeros.any())):
        return scaled_matrix(weight, scale, scheme.blocks)
    outputs, inputs = matrix_shape("weight", weight)
    spread = _spread(scheme, parts, (outputs, inputs), zeros)

    def read(rows: slice, columns: slice) -> Tensor:
        zero, scales = spread(rows, columns)
        return (one_byte(weight[rows, columns]) - zero).mul_(scales)

    return PackedMatrix((outputs, inputs), read)


def _packed(scheme: Scheme, parts: Mapping[str, StoredSlice]) -> StoredSlice:
    from tandem.engine.checkpoint_formats.packed_numbers import PackedMatrix, unpack_dense

    bits, (weight, shape) = scheme.bits, need(parts, "weight_packed", "weight_shape")
    check_shape("weight_shape", shape, [2])
    outputs, inputs = (int(size) for size in shape[:])
    check_shape("weight_packed", weight, [outputs, -(-inputs * bits // 32)])
    offset, zeros = 1 << (bits - 1), None
    if "weight_zero_point" in parts:
        zeros = (unpack_dense(parts["weight_zero_point"][:].T, bits, slice(0, outputs)).T - offset).float()
    spread = _spread(scheme, parts, (outputs, inputs), zeros)

    def read(rows: slice, columns: slice) -> Tensor:
        zero, scales = spread(rows, columns)
        return (unpack_dense(weight[rows], bits, columns) - offset).float().sub_(zero).mul_(scales)

    return PackedMatrix((outputs, inputs), read)


def _spread(
    scheme: Scheme, parts: Mapping[str, StoredSlice], shape: tuple[int, int], zeros: Tensor | None
) -> Callable[[slice, slice], tuple[Tensor | float, Tensor]]:
    """A function of rows and columns: zeros and scales that fit these numbers."""
    from tandem.engine.checkpoint_formats.packed_numbers import finite, places, whole

    (scale,), (outputs, inputs) = need(parts, "weight_scale"), shape
    group = scheme.group or max(1, inputs)
    groups = -(-inputs // group)
    check_shape("weight_scale", scale, [outputs, groups], *([] if groups > 1 else [[outputs], [1], []]))
    scales = finite(whole(scale)).reshape(-1, groups).expand(outputs, groups)
    if zeros is not None:
        if zeros.numel() not in (outputs * groups, groups):
            raise ValueError(f"its weight_zero_point has {zeros.numel()} numbers, not {outputs} x {groups}")
        zeros = zeros.reshape(-1, groups).expand(outputs, groups)
    order = parts["weight_g_idx"][:].long() if "weight_g_idx" in parts else None
    if order is not None and (len(order) != inputs or not bool(((order >= -1) & (order < groups)).all())):
        raise ValueError(f"its weight_g_idx does not name one of {groups} groups for each of {inputs} inputs")
    is_ordered = order is not None and not bool((order < 0).any())  # -1: written, but not in use

    def spread(rows: slice, columns: slice) -> tuple[Tensor | float, Tensor]:
        of = order[columns] if order is not None and is_ordered else places(columns, group)
        return 0.0 if zeros is None else zeros[rows][:, of], scales[rows][:, of]

    return spread


def _fp4(scheme: Scheme, parts: Mapping[str, StoredSlice]) -> StoredSlice:
    import torch

    from tandem.engine.checkpoint_formats.packed_numbers import PackedMatrix, expect, finite, places, whole

    weight, scale = need(parts, "weight_packed", "weight_scale")
    outputs, halves = matrix_shape("weight_packed", weight)
    inputs, group = 2 * halves, _FP4_GROUPS[scheme.form]
    check_shape("weight_scale", scale, [outputs, -(-inputs // group)])
    of_all = None
    if scheme.form == _NVFP4:
        (global_scale,) = need(parts, "weight_global_scale")
        check_shape("weight_global_scale", global_scale, [1], [])
        of_all = finite(whole(global_scale)).reshape(())
        if not bool(of_all):
            raise ValueError("its weight_global_scale is 0")
    table = torch.tensor(_FP4)

    def scales_of(rows: slice) -> Tensor:
        if of_all is not None:
            return finite(scale[rows]) / of_all
        exponents = scale[rows].view(torch.uint8)
        if bool((exponents == _E8M0_NAN).any()):
            raise ValueError("its scales are not finite")
        return torch.exp2(exponents.float() - _E8M0_BIAS)

    def read(rows: slice, columns: slice) -> Tensor:
        some = slice(columns.start // 2, -(-columns.stop // 2))
        both = expect(weight[rows, some], torch.uint8)
        fields = torch.stack((both & 15, both >> 4), 2).flatten(1)
        mine = slice(columns.start - 2 * some.start, columns.stop - 2 * some.start)
        return table[fields[:, mine].long()].mul_(scales_of(rows)[:, places(columns, group)])

    return PackedMatrix((outputs, inputs), read)


def read(fields: Fields) -> CompressedTensors:
    """Raises ModelError for another variant."""
    groups: Any = fields.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise fields.error(f"config_groups is {groups!r}", why="it must say how groups of modules are stored")
    return CompressedTensors(tuple(_scheme(fields, group) for group in groups.values()))


def _scheme(fields: Fields, group: Any) -> Scheme:
    if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
        raise fields.error(f"{group!r} in config_groups is not supported", why="it does not say how weights are stored")
    weights, targets = Fields(group["weights"], fields.path), group.get("targets")
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise fields.error(f"targets is {targets!r} in config_groups", why="it must be a list of names")
    for target in targets:
        try:
            re.compile(target.removeprefix("re:") if target.startswith("re:") else "")
        except re.error as error:
            raise fields.error(f"the target {target!r} in config_groups is not valid", why=str(error)) from error
    form = str(group.get("format") or fields.get("format"))
    if form not in _FORMATS:
        raise fields.error(
            f"compressed-tensors of the format {form} are not supported", todo=f"use {', '.join(sorted(_FORMATS))}"
        )
    strategy, bits = str(weights.get("strategy") or "tensor"), weights.positive("num_bits", default=8)
    if strategy not in _STRATEGIES:
        raise fields.error(f"scales of the strategy {strategy} are not supported", todo=f"use {', '.join(_STRATEGIES)}")
    if bits > 8:
        raise fields.error(f"weights of {bits} bits are not supported", todo="use at most 8 bits")
    blocks: Any = weights.get("block_structure")
    are_sizes = isinstance(blocks, list) and len(blocks) == 2 and all(type(one) is int and one > 0 for one in blocks)
    if strategy == "block" and not are_sizes:
        raise fields.error(f"block_structure is {blocks!r}", why="it must be the rows and columns that share a scale")
    size = weights.positive("group_size") if strategy == "group" and weights.get("group_size") != -1 else None
    return Scheme(
        targets=tuple(targets), form=form, bits=bits, group=size,
        blocks=(blocks[0], blocks[1]) if strategy == "block" else None,
    )  # fmt: skip
