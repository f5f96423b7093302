"""Packs numbers into the formats of checkpoints, number by number, apart from the code that reads them."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tandem.engine.checkpoint_formats import StoredFormat, read_format
from tandem.engine.config_fields import Fields
from tandem.engine.weights import Parameter, TensorPart, TensorSplit, load_weights


def dense(fields: list[int], bits: int) -> list[int]:
    """Signed words of 32 bits: fields one behind the other, the lowest bits first."""
    stream = sum(field << (place * bits) for place, field in enumerate(fields))
    words = [(stream >> (32 * word)) & 0xFFFFFFFF for word in range(-(-len(fields) * bits // 32))]
    return [word - (1 << 32) if word >> 31 else word for word in words]


def dense_rows(fields: Tensor, bits: int) -> Tensor:
    """Every row of [n, fields] as words."""
    return torch.tensor([dense(row, bits) for row in fields.tolist()], dtype=torch.int32)


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The outputs in a word, by place from the lowest 4 bits up."""


def awq_words(fields: Tensor) -> Tensor:
    """Every row of [n, outputs] as words of eight."""
    order = torch.tensor(AWQ_ORDER)
    return dense_rows(fields.view(len(fields), -1, 8)[:, :, order].flatten(1), 4)


def format_of(**config: Any) -> StoredFormat:
    found = read_format(Fields({"quantization_config": config}, Path("config.json")))
    assert found is not None
    return found


def loaded(
    folder: Path, tensors: dict[str, Tensor], shape: tuple[int, int], stored: StoredFormat | None, *,
    key: str = "a.weight", split: TensorSplit = TensorSplit.WHOLE, ranks: int = 1,
) -> Tensor:  # fmt: skip
    """The weight `key` of a checkpoint with these tensors, in fp32; of several ranks their shares together."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    shares = []
    for rank in range(ranks):
        part = Parameter.on_meta(
            (TensorPart(key=key, rows=shape[0]),), columns=shape[1], split=split, dtype=torch.float32, tp_size=ranks
        )
        load_weights(folder, [part], tp_rank=rank, tp_size=ranks, stored=stored)
        shares.append(part.tensor)
    return torch.cat(shares, 1 if split is TensorSplit.COLUMNS else 0)


def shares_are_the_whole(
    folder: Path, tensors: dict[str, Tensor], expected: Tensor, stored: StoredFormat, ranks: int = 2
) -> None:
    """The weight is `expected`, whole and in ranks' slices of rows and of columns."""
    shape = (expected.shape[0], expected.shape[1])
    for split, count in ((TensorSplit.WHOLE, 1), (TensorSplit.ROWS, ranks), (TensorSplit.COLUMNS, ranks)):
        assert torch.equal(loaded(folder, tensors, shape, stored, split=split, ranks=count), expected)
