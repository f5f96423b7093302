"""Reads the FP8 format of a checkpoint from `config.json`: blocks with a scale each, as DeepSeek-V3. Imports no
torch."""

from __future__ import annotations

from tandem.engine.config_fields import Fields

FP8 = "fp8"
"""`quant_method` of `quantization_config`."""


def read_scale_blocks(raw: Fields) -> tuple[int, int] | None:
    """Rows and columns of a matrix that share a scale; None where weights are not of this kind. Raises ModelError."""
    quantization = raw.get("quantization_config")
    if not isinstance(quantization, dict) or quantization.get("quant_method") != FP8:
        return None
    fields = Fields(quantization, raw.path)
    if fields.get("fmt") not in (None, "e4m3"):
        raise raw.error(f"fp8 weights of the format {fields.get('fmt')} are not supported", todo="use e4m3")
    blocks = fields.get("weight_block_size")
    if not isinstance(blocks, list) or len(blocks) != 2 or not all(type(one) is int and one > 0 for one in blocks):
        raise raw.error(
            f"weight_block_size is {blocks!r}", why="fp8 weights are read where blocks of rows and columns have scales",
            todo="use a checkpoint with scales of blocks, or plain weights",
        )  # fmt: skip
    return blocks[0], blocks[1]
