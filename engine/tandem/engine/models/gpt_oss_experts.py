"""gpt-oss's experts as its checkpoints have them: those of a layer in one tensor, gate and up row by row in turns.

    plain     gate_up_proj [count, hidden, 2 · features], down_proj [count, features, hidden]: inputs first
    mxfp4     gate_up_proj_blocks [count, 2 · features, hidden / 32, 16], down_proj_blocks [count, hidden, …], …_scales
    biases    gate_up_proj_bias [count, 2 · features], down_proj_bias [count, hidden]
    GGUF      gate_proj, up_proj and down_proj of each expert, .weight and .bias, named as in other families

In memory an expert's gate lies on top of its up, as in other families, so that ranks share them alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.engine.experts_config import MXFP4_GROUP, BiasedExpertsConfig
from tandem.engine.models.experts import ExpertParameters
from tandem.engine.models.mlp import MakeParameter
from tandem.engine.weights import Checkpoint, Parameter, TensorPart, TensorSplit

GROUP_BYTES = MXFP4_GROUP // 2
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = (*_POSITIVE, *(-value for value in _POSITIVE))
_BIAS = 127


StackParameter = Callable[..., Parameter]
"""`Parameter.on_meta` for the model's dtype and ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedExpert:
    """Where expert `index` of `count` lies: a matrix of `rows` and `columns` as computed, or without columns a bias.

    is_paired: its rows are gate, up, gate, up, …; they are read as gates, then ups.
    """

    name: str
    index: int
    count: int
    rows: int
    columns: int | None
    is_paired: bool
    is_mxfp4: bool

    @property
    def keys(self) -> tuple[str, ...]:
        return (f"{self.name}_blocks", f"{self.name}_scales") if self.is_mxfp4 else (self.name,)

    def read(self, checkpoint: Checkpoint, rows: slice, columns: slice, dtype: torch.dtype) -> Tensor:
        """[rows, columns] of the expert, packed ones in `dtype`; a bias is [rows]."""
        if self.columns is None:
            data = checkpoint.slice_of(self.name, (self.count, self.rows))[self.index, rows]
        elif self.is_mxfp4:
            data = self._unpacked(checkpoint, rows, columns, dtype)
        else:
            stored = checkpoint.slice_of(self.name, (self.count, self.columns, self.rows))
            data = stored[self.index, columns, rows].t()
        return torch.cat((data[0::2], data[1::2])) if self.is_paired else data

    def _unpacked(self, checkpoint: Checkpoint, rows: slice, columns: slice, dtype: torch.dtype) -> Tensor:
        """A rank's columns may begin and end within a group."""
        assert self.columns is not None
        shape = (self.count, self.rows, self.columns // MXFP4_GROUP)
        groups = slice(columns.start // MXFP4_GROUP, -(-columns.stop // MXFP4_GROUP))
        blocks, scales = (
            checkpoint.slice_of(key, of)[self.index, rows, groups]
            for key, of in zip(self.keys, ((*shape, GROUP_BYTES), shape), strict=True)
        )
        first = columns.start - groups.start * MXFP4_GROUP
        return dequantize_mxfp4(blocks, scales, dtype)[:, first : first + columns.stop - columns.start]


def dequantize_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Unpack numbers of 4 bits with a scale a group: [..., groups · 32] in `dtype`, exact where it has them.

        blocks   uint8 [..., groups, 16]   two numbers a byte, the lower half first: sign, exponent of two bits, one bit
        scales   uint8 [..., groups]       the power of two that a group is multiplied by, plus 127

    Else rounded once. OCP Microscaling Formats 1.0, sections 5.2 and 5.4. Raises TypeError unless both are uint8,
    ValueError if their shapes do not belong together.
    """
    if blocks.dtype is not torch.uint8 or scales.dtype is not torch.uint8:
        raise TypeError(f"blocks and scales must be uint8, got {blocks.dtype} and {scales.dtype}")
    if blocks.shape != (*scales.shape, GROUP_BYTES):
        raise ValueError(
            f"blocks are {list(blocks.shape)}, scales {list(scales.shape)}: a group has {GROUP_BYTES} bytes"
        )
    halves = torch.stack((blocks & 0x0F, blocks >> 4), -1).flatten(-2)
    values = torch.tensor(_VALUES, dtype=dtype, device=blocks.device)
    numbers = values.index_select(0, halves.flatten().int()).view(halves.shape)
    return torch.ldexp(numbers, scales[..., None].int() - _BIAS).to(dtype).flatten(-2)


def biased_expert_parameters(
    experts: BiasedExpertsConfig, layer: str, hidden: int, make: MakeParameter, stack: StackParameter
) -> ExpertParameters:
    """The experts of `layer` ("model.layers.0")."""
    pair, mlp = 2 * experts.intermediate, f"{layer}.mlp"

    def parts(name: str, rows: int, columns: int | None) -> tuple[TensorPart, ...]:
        is_packed = experts.is_mxfp4 and columns is not None
        sources = [
            StackedExpert(
                name=f"{mlp}.experts.{name}", index=index, count=experts.count, rows=rows, columns=columns,
                is_paired=rows == pair and name.startswith("gate_up"), is_mxfp4=is_packed,
            )
            for index in range(experts.count)
        ]  # fmt: skip
        return tuple(TensorPart(key=source.keys[0], rows=rows, source=source) for source in sources)

    def each(kind: str, rows: int, *names: str) -> tuple[TensorPart, ...]:
        keys = (f"{mlp}.experts.{index}.{name}.{kind}" for index in range(experts.count) for name in names)
        return tuple(TensorPart(key=key, rows=rows) for key in keys)

    features = experts.intermediate
    gate_up = stack(parts("gate_up_proj", pair, hidden), columns=hidden, split=TensorSplit.ROWS)
    gate_up_bias = stack(parts("gate_up_proj_bias", pair, None), split=TensorSplit.ROWS)
    down = stack(parts("down_proj", hidden, features), columns=features, split=TensorSplit.COLUMNS)
    down_bias = stack(parts("down_proj_bias", hidden, None))
    for kind, of_pair, of_down in (("weight", gate_up, down), ("bias", gate_up_bias, down_bias)):
        of_pair.other_parts = each(kind, features, "gate_proj", "up_proj")
        of_down.other_parts = each(kind, hidden, "down_proj")
    return ExpertParameters(
        router=make((f"{mlp}.router", experts.count), columns=hidden),
        router_bias=make((f"{mlp}.router", experts.count), kind="bias"),
        gate_up=gate_up, gate_up_bias=gate_up_bias, down=down, down_bias=down_bias,
    )  # fmt: skip


def clamped_gate(experts: BiasedExpertsConfig, *, is_deterministic: bool) -> Callable[[Tensor], Tensor]:
    """gate_up [T, 2 · features], gate first, which is written over, to [T, features]; see `BiasedExpertsConfig`.

    torch's sigmoid treats numbers behind the last whole vector otherwise; written out in fp32, rows are independent.
    """

    def activate(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        gate.clamp_(max=experts.limit)
        if is_deterministic:
            share = gate.float().mul(-experts.alpha).exp_().add_(1.0).reciprocal_().to(gate.dtype)
        else:
            share = (gate * experts.alpha).sigmoid_()
        return share.mul_(gate).mul_(up.clamp_(-experts.limit, experts.limit).add_(1.0))

    return activate
