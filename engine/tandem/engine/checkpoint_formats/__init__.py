"""Weights as published checkpoints store them: packed, with scales. Read into plain numbers, format by format.

A format is one file: what `quantization_config` says of it, which tensors are a weight, and how numbers come of them.
It is found by `quant_method`, without a flag. Imports no torch before a weight is read.
"""

from __future__ import annotations

from collections.abc import Callable

from tandem.engine.checkpoint_formats import awq, bitsandbytes, compressed_tensors, fp8, gptq
from tandem.engine.checkpoint_formats.interface import StoredFormat, StoredSlice
from tandem.engine.config_fields import Fields

__all__ = ["READERS", "StoredFormat", "StoredSlice", "read_format"]

READERS: dict[str, Callable[[Fields], StoredFormat]] = {
    "awq": awq.read, "bitsandbytes": bitsandbytes.read, "compressed-tensors": compressed_tensors.read, "fp8": fp8.read,
    "gptq": gptq.read,
}  # fmt: skip
"""From `quant_method` to the reader of the rest of `quantization_config`."""


def read_format(raw: Fields) -> StoredFormat | None:
    """The format of the weights beside this config.json; None where they are plain, or of a kind that is not here.
    Raises ModelError for one that is here with settings that it cannot read."""
    values = raw.get("quantization_config") or raw.get("compression_config")
    read = READERS.get(str(values.get("quant_method"))) if isinstance(values, dict) else None
    return None if read is None else read(Fields(values, raw.path))
