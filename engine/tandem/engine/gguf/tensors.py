"""The tensors of a GGUF file under Hugging Face's names, as lazy slices: only what a rank requests is read.

    the file   blk.0.attn_q.weight, rows of whole blocks      the model   model.layers.0.self_attn.q_proj.weight

It knows names, order and blocks; the loader decides which rank needs which part.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from tandem.core.errors import ModelError
from tandem.core.gguf.file import GgufFile, StoredTensor
from tandem.core.gguf.model_files import GgufModel
from tandem.engine.gguf import deepseek
from tandem.engine.gguf.config import EMBEDDING, HEAD, ROPE_FACTORS
from tandem.engine.gguf.dequantize import DEQUANTIZE, dequantize
from tandem.engine.gguf.families import GgufFamily, family_of
from tandem.engine.gguf.keys import MetadataReader

_NUMBERS_AT_ONCE = 1 << 18
"""Numbers converted at once: their intermediate results stay in a cache."""
_BLOCK = re.compile(r"blk\.(\d{1,5})\.(\w+)\.(weight|bias)", re.ASCII)
_OUTER = {EMBEDDING: "model.embed_tokens.weight", HEAD: "lm_head.weight", "output_norm.weight": "model.norm.weight"}
_TURNED = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}


Rows = range | Tensor
"""Of a file: side by side, or each by its number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufSlice:
    """As a safetensors slice: a shape, and rows and columns as numbers.

    entry        of a tensor [experts, rows, columns], or [experts, rows] of biases, the one that this is
    head_rows    0, or how many rows a head has, which the file has in turns: the first of each half, the second …
    is_raised    the file has 1 + what the model has
    """

    file: GgufFile
    stored: StoredTensor
    entry: int | None = None
    head_rows: int = 0
    is_raised: bool = False

    @property
    def kind(self) -> str:
        """The type of its blocks."""
        return self.stored.kind.name

    def get_shape(self) -> list[int]:
        return list(self.stored.shape if self.entry is None else self.stored.shape[1:])

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        """fp32, owned by the caller, of slices of step 1; of types that torch has, in that type.

        Raises ModelError for a type that is not read.
        """
        shape = self.get_shape()
        if self.kind not in DEQUANTIZE:
            raise ModelError(
                f"{self.stored.name} in {self.file.path} is {self.kind}", why=f"Tandem reads {', '.join(DEQUANTIZE)}",
                todo="use a file with another quantisation",
            )  # fmt: skip
        if len(shape) == 1:
            (start, stop, _) = index[0].indices(shape[0])
            # A vector is one row; what is taken of it need not be whole blocks.
            numbers = self._numbers(range(1), 0, shape[0])[0]
            return _taken(numbers, self._rows(start, stop)).clone()
        (first, last, _), (start, stop, _) = (one.indices(size) for one, size in zip(index, shape, strict=True))
        return self._numbers(self._rows(first, last), start, stop)

    def blocks(self, rows: slice, columns: slice) -> Tensor:
        """Return the stored bytes, uint8 [rows, bytes], in the model's order of rows. Raises ValueError unless the
        columns of a matrix are whole blocks."""
        (first, last, _), (start, stop, _) = (
            one.indices(size) for one, size in zip((rows, columns), self.get_shape(), strict=True)
        )
        if start % self.stored.kind.block or stop % self.stored.kind.block:
            raise ValueError(f"columns {start} to {stop} do not align with blocks of {self.stored.kind.block}")
        return _taken(self._stored()[:, self._bytes(start, stop)], self._rows(first, last)).clone()

    def _numbers(self, rows: Rows, start: int, stop: int) -> Tensor:
        """[len(rows), stop - start] of the file's rows."""
        block, kind = self.stored.kind.block, self.kind
        low, high = start // block * block, -(-stop // block) * block
        plain = {"F16": torch.float16, "BF16": torch.bfloat16}.get(kind, torch.float32)
        made = torch.empty((len(rows), stop - start), dtype=torch.float32 if self.is_raised else plain)
        stored = self._stored()[:, self._bytes(low, high)]
        at_once = max(1, _NUMBERS_AT_ONCE // max(1, high - low))
        for first in range(0, len(rows), at_once):
            some = _taken(stored, rows[first : first + at_once])
            numbers = dequantize(kind, some.reshape(-1, self.stored.kind.block_bytes)).view(len(some), high - low)
            made[first : first + len(some)] = numbers[:, start - low : stop - low]
        return made.sub_(1) if self.is_raised else made

    def _stored(self) -> Tensor:
        """All its rows as they are in the file, mapped: uint8 [rows, bytes of a row]. It must not be written to."""
        data = self.file.data
        whole = torch.frombuffer(data, dtype=torch.uint8, count=self.stored.size, offset=self.stored.start)
        rows = whole.view(-1, self.stored.row_bytes)
        if self.entry is None:
            return rows
        each = prod(self.stored.shape[1:-1])
        return rows[self.entry * each : (self.entry + 1) * each]

    def _bytes(self, start: int, stop: int) -> slice:
        kind = self.stored.kind
        return slice(start // kind.block * kind.block_bytes, stop // kind.block * kind.block_bytes)

    def _rows(self, first: int, last: int) -> Rows:
        """Where rows `first` to `last` of the model are in the file."""
        if not self.head_rows:
            return range(first, max(first, last))
        rows = torch.arange(first, max(first, last))
        # The model: head, half, place. The file: head, place, half.
        head, inside = rows // self.head_rows, rows % self.head_rows
        half, place = inside // (self.head_rows // 2), inside % (self.head_rows // 2)
        return head * self.head_rows + place * 2 + half


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadPairs:
    """As a slice of one matrix [heads · (key + value), rank], what makes keys and values of a latent.

        keys [heads, rank, key], values [heads, value, rank]        the matrix: keys of a head, values of it, the next …

    Raises ModelError unless the two belong together.
    """

    keys: GgufSlice
    values: GgufSlice

    def __post_init__(self) -> None:
        keys, values = self.keys.get_shape(), self.values.get_shape()
        if len(keys) != 3 or len(values) != 3 or (keys[0], keys[1]) != (values[0], values[2]):
            what = f"{self.keys.stored.name} and {self.values.stored.name} in {self.keys.file.path}"
            raise ModelError(f"{what} are {keys} and {values}", why="they must be of the same heads and rank")

    def get_shape(self) -> list[int]:
        return [self.keys.stored.shape[0] * self._each, self.keys.stored.shape[1]]

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        """As `GgufSlice` has it. Heads that `index` does not touch are not read."""
        (first, last, _), (start, stop, _) = (
            one.indices(size) for one, size in zip(index, self.get_shape(), strict=True)
        )
        low, high, columns = first // self._each, -(-last // self._each), slice(start, stop)
        pairs = [self._head(head, columns) for head in range(low, max(low, high))]
        rows = torch.cat(pairs) if pairs else torch.empty((0, max(0, stop - start)))
        return rows[first - low * self._each : last - low * self._each]

    def _head(self, head: int, columns: slice) -> Tensor:
        keys, values = replace(self.keys, entry=head), replace(self.values, entry=head)
        return torch.cat((keys[columns, :].t().float(), values[:, columns].float()))

    @property
    def _each(self) -> int:
        """Rows of a head."""
        return self.keys.stored.shape[2] + self.values.stored.shape[1]


def _taken(stored: Tensor, rows: Rows) -> Tensor:
    """Those rows; views where they lie side by side."""
    return stored[rows.start : rows.stop] if isinstance(rows, range) else stored.index_select(0, rows)


class GgufTensors:
    """As an open safetensors file: `keys` and `get_slice`.

    Raises ModelError for a file that is damaged, or has a tensor that no layer of its architecture has.
    """

    def __init__(self, path: Path) -> None:
        model = GgufModel(path)
        self._slices = dict(_named(model, family_of(model), MetadataReader(model.metadata)))

    def keys(self) -> list[str]:
        return list(self._slices)

    def get_slice(self, key: str) -> GgufSlice | HeadPairs:
        """KeyError without one."""
        return self._slices[key]


def _named(model: GgufModel, family: GgufFamily, keys: MetadataReader) -> Iterator[tuple[str, GgufSlice | HeadPairs]]:
    for name, file in model.file_of.items():
        whole = GgufSlice(file=file, stored=file.tensors[name])
        outer, block = _OUTER.get(name), _BLOCK.fullmatch(name)
        if outer is not None:
            yield outer, replace(whole, is_raised=family.has_raised_norms and name == "output_norm.weight")
        elif block is not None and (block[2] in family.layer or block[2] in family.experts):
            yield from _of_layer(whole, (int(block[1]), block[2], block[3]), family, keys)
        elif block is not None and f"{block[2]}.{block[3]}" in family.whole:
            yield f"model.layers.{int(block[1])}.{family.whole[f'{block[2]}.{block[3]}']}", whole
        elif (
            block is not None
            and family.has_latent
            and block[2] in deepseek.PAIR
            and (pairs := _pairs_of(model, int(block[1])))
        ):
            yield f"model.layers.{int(block[1])}.{family.layer['attn_kv_b']}.weight", pairs  # of both, the same
        elif name != ROPE_FACTORS:
            why = f"no layer of {keys.architecture} is computed with it"
            raise ModelError(f"{model.path} has a tensor {name}", why=why, todo="serve the model's safetensors")


def _pairs_of(model: GgufModel, layer: int) -> HeadPairs | None:
    """Return the layer's pair of tensors; None unless both are there."""
    names = [f"blk.{layer}.{part}.weight" for part in deepseek.PAIR]
    if not model.file_of.keys() >= set(names):
        return None
    keys, values = (GgufSlice(file=model.file_of[name], stored=model.tensor(name)) for name in names)
    return HeadPairs(keys=keys, values=values)


def _of_layer(
    whole: GgufSlice, name: tuple[int, str, str], family: GgufFamily, keys: MetadataReader
) -> Iterator[tuple[str, GgufSlice]]:
    layer, part, kind = name
    prefix, shape = f"model.layers.{layer}", whole.stored.shape
    if part in family.experts:
        block, own = family.experts[part]
        experts = keys.experts()
        if len(shape) != (3 if kind == "weight" else 2) or shape[0] != experts:
            why = f"it must have {experts} experts"
            raise ModelError(f"{whole.stored.name} in {whole.file.path} is {list(shape)}", why=why)
        for expert in range(shape[0]):
            yield f"{prefix}.{block}.experts.{expert}.{own}.{kind}", replace(whole, entry=expert)
        return
    if family.has_turned_heads and part in _TURNED:
        rows = shape[0] if len(shape) <= 2 else 0
        heads = keys.positive(_TURNED[part], keys.positive("attention.head_count"))
        if rows % (2 * heads):
            raise ModelError(f"{whole.stored.name} in {whole.file.path} has {rows} rows", why=f"of {heads} heads")
        whole = replace(whole, head_rows=rows // heads)
    is_norm = part.endswith("_norm")
    yield f"{prefix}.{family.layer[part]}.{kind}", replace(whole, is_raised=family.has_raised_norms and is_norm)
