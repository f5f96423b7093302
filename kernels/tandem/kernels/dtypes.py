"""The dtypes in which KV may be stored (`tandem.core.kvlayout`), as torch names them."""

from __future__ import annotations

import torch

from tandem.core.kvlayout import DTYPE_BYTES

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_BYTES}
