"""MXFP4 against transformers' own dequantisation, bit for bit."""

from __future__ import annotations

import pytest
import torch

from tandem.engine.mxfp4 import dequantize_mxfp4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_number_and_every_scale_is_that_of_transformers(dtype: torch.dtype) -> None:
    """All 256 bytes under all 256 scales, the largest and the smallest among them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    scales = torch.arange(256, dtype=torch.uint8).view(1, 256, 1).expand(2, 256, 16).contiguous()
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(2, 256, 16, 16).contiguous()
    found = dequantize_mxfp4(blocks, scales, dtype)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=dtype).transpose(1, 2)
    assert (found.shape, found.dtype) == ((2, 256, 512), dtype)
    torch.testing.assert_close(found, expected, atol=0, rtol=0, equal_nan=True)


def test_a_group_by_hand() -> None:
    """The lower half of a byte comes first; a scale of 127 is one."""
    blocks = torch.tensor([[[0x21, 0x93] + [0x7F] * 14]], dtype=torch.uint8)
    scales = torch.tensor([[128]], dtype=torch.uint8)
    found = dequantize_mxfp4(blocks, scales, torch.float32)
    assert found.tolist() == [[1.0, 2.0, 3.0, -1.0] + [-12.0, 12.0] * 14]


def test_what_is_no_mxfp4_is_refused() -> None:
    blocks, scales = torch.zeros(2, 3, 16, dtype=torch.uint8), torch.zeros(2, 3, dtype=torch.uint8)
    with pytest.raises(TypeError, match="uint8"):
        dequantize_mxfp4(blocks, scales.float(), torch.float32)
    with pytest.raises(ValueError, match="16 bytes"):
        dequantize_mxfp4(blocks[..., :8], scales, torch.float32)
