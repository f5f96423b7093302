"""Numbers of 4 bits in groups of 32 with a scale each, as gpt-oss stores its experts, read into plain numbers.

    blocks   uint8 [..., groups, 16]   two numbers a byte, the lower half first: sign, exponent of two bits, one bit
    scales   uint8 [..., groups]       the power of two that a group is multiplied by, plus 127

OCP Microscaling Formats 1.0, sections 5.2 and 5.4. It must not know about files.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.engine.gpt_oss_config import MXFP4_GROUP

GROUP = MXFP4_GROUP
GROUP_BYTES = GROUP // 2
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = (*_POSITIVE, *(-value for value in _POSITIVE))
_BIAS = 127


def dequantize_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., groups * 32] in `dtype`, exact where it has the numbers, else rounded once.

    Raises TypeError unless both are uint8, ValueError if their shapes do not belong together.
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
