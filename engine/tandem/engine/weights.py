"""Strict loading: mapped safetensors straight into the tensors of one rank. Pickled weights are never opened.

A `Parameter` lists its checkpoint tensors and how ranks share them; the loader knows no model.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from tandem.core.errors import ModelError
from tandem.core.gguf.model_files import is_gguf
from tandem.engine.checkpoint_formats import StoredFormat, StoredSlice
from tandem.engine.gguf.tensors import GgufTensors
from tandem.engine.model_source import INDEX_NAME, weight_files

MAX_NUMBERS = 1 << 48
"""Most numbers of a tensor; torch takes no sizes with a product above 63 bits of bytes."""
_NAMED = 3  # keys that an error spells out


class TensorSplit(Enum):
    """How ranks share a tensor: each its own copy, a slice of dim 0 (output features) or of dim 1 (input features).

    PADDED_ROWS: slices of dim 0 of one size, the last ones filled up with zeros (a vocabulary).
    """

    WHOLE = "whole"
    ROWS = "rows"
    COLUMNS = "columns"
    PADDED_ROWS = "padded rows"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertEntry:
    """Where a matrix lies in a checkpoint tensor of many, [of, stored_rows, columns]: rows from `first_row` on of entry
    `index`."""

    index: int
    of: int
    first_row: int
    stored_rows: int


class TensorSource(Protocol):
    """Reads a part that the checkpoint does not have as the model does: turned, in turns, or packed."""

    @property
    def keys(self) -> tuple[str, ...]:
        """The tensors that it reads."""

    def read(self, checkpoint: Checkpoint, rows: slice, columns: slice, dtype: torch.dtype) -> Tensor:
        """[rows, columns] of the part, [rows] of a vector, which ignores columns; a packed part is unpacked into
        `dtype`. Raises ModelError for tensors of another shape, TypeError or ValueError for a part that cannot be
        unpacked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPart:
    """One checkpoint tensor inside a Parameter, or with `entry` a piece of one, or what `source` makes of some. `rows`
    counts dim 0 of all ranks' part.

    `replicas` ranks in a row hold the same slice: KV heads when there are fewer of them than ranks.
    """

    key: str
    rows: int
    replicas: int = 1
    entry: ExpertEntry | None = None
    source: TensorSource | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.key,) if self.source is None else self.source.keys


@dataclass(slots=True, kw_only=True)
class Parameter:
    """A tensor of the model: its parts stacked along dim 0. `columns` is dim 1 of the whole tensor, None for vectors.

    `other_parts`, of the same rows in the same order, are those of checkpoints that spell them differently. `tensor` is
    on the meta device with this rank's shape until `load_weights` replaces it.
    """

    parts: tuple[TensorPart, ...]
    other_parts: tuple[TensorPart, ...] = ()
    columns: int | None = None
    split: TensorSplit = TensorSplit.WHOLE
    tensor: Tensor

    @classmethod
    def on_meta(
        cls, parts: tuple[TensorPart, ...], *, columns: int | None = None, split: TensorSplit = TensorSplit.WHOLE,
        dtype: torch.dtype, tp_size: int = 1,
    ) -> Parameter:  # fmt: skip
        """A parameter without memory, shaped for one of `tp_size` ranks. ValueError if it cannot be split evenly,
        ModelError if it is larger than any machine's memory."""
        rows = sum(_rows(part, split, tp_size) for part in parts)
        shape = (rows,) if columns is None else (rows, _share(columns, tp_size, split is TensorSplit.COLUMNS))
        if prod(shape) > MAX_NUMBERS:
            raise ModelError(
                f"{parts[0].key} would be {list(shape)}", why=f"at most {MAX_NUMBERS} numbers are in a tensor",
                todo="check the sizes in config.json, or download the model again",
            )  # fmt: skip
        tensor = torch.empty(shape, dtype=dtype, device="meta")
        return cls(parts=parts, columns=columns, split=split, tensor=tensor)

    def parts_in(self, keys: Container[str]) -> tuple[TensorPart, ...]:
        """The parts as a checkpoint with these keys spells them."""
        is_other = self.other_parts and all(part.key in keys for part in self.other_parts)
        return self.other_parts if is_other else self.parts


def load_weights(
    model_dir: Path, parameters: Iterable[Parameter], *, device: str = "cpu", tp_rank: int = 0, tp_size: int = 1,
    ignored_keys: Iterable[str] = (), ignored_prefixes: tuple[str, ...] = (),
    stored: StoredFormat | None = None, on_loaded: Callable[[Parameter], None] = lambda _: None,
) -> None:  # fmt: skip
    """Fill every parameter of rank `tp_rank` from the checkpoint in `model_dir`, in its dtype, on `device`.

    Every checkpoint key must be used, save `ignored_keys`, those that begin as one of `ignored_prefixes`, and the
    rotary buffers that old exports carry. `stored`: as `ModelConfig` has it. `on_loaded` is called with each as it is
    there, and may take its tensor away: one at a time is in memory then. Raises ModelError for missing, unexpected
    or misshapen tensors and for files that are absent, truncated or pickled.
    """
    wanted = list(parameters)
    with open_checkpoint(model_dir, stored) as checkpoint:
        ignored = {key for key in checkpoint.file_of if key.startswith(ignored_prefixes)}
        _check_keys(checkpoint, wanted, ignored.union(ignored_keys))
        for parameter in wanted:
            target = torch.empty(parameter.tensor.shape, dtype=parameter.tensor.dtype, device=device)
            start = 0
            for part in parameter.parts_in(checkpoint.file_of):
                start += _fill(checkpoint, parameter, part, target[start:], tp_rank, tp_size)
            parameter.tensor = target
            on_loaded(parameter)


class Checkpoint:
    """The mapped files of a model and the file of each key; the parts of a weight in `stored` form are one key.

    `about` describes the model, for errors.
    """

    def __init__(
        self, folder: Path, files: dict[str, Any], stored: StoredFormat | None = None, *, about: str = "config.json"
    ) -> None:
        self.folder, self._about, self._files, self._stored = folder, about, files, stored
        self._keys = {key: name for name, file in files.items() for key in file.keys()}  # noqa: SIM118
        self._parts = {} if stored is None else stored.weights(self._keys)
        within = {part for parts in self._parts.values() for part in parts.values()}
        self.file_of: dict[str, str] = {
            key: name
            for key, name in self._keys.items()
            if key not in within and not (stored is not None and stored.is_unused(key))
        } | {key: self._keys[next(iter(parts.values()))] for key, parts in self._parts.items()}

    def slice_of(self, key: str, shape: tuple[int, ...]) -> StoredSlice:
        """A lazy safetensors slice of tensor `key`; indexing it copies only what was asked for, and unpacks it.

        Raises ModelError unless the tensor has this shape, ValueError for parts that contradict each other.
        """
        found = self._slice_of(key)
        if tuple(found.get_shape()) != shape:
            raise ModelError(
                f"{key} in {self.path_of(key)} has shape {list(found.get_shape())}",
                why=f"{self._about} asks for {list(shape)}",
                todo=f"check that {self._about} and the weights belong together",
            )  # fmt: skip
        return found

    def _slice_of(self, key: str) -> StoredSlice:
        parts = self._parts.get(key)
        if parts is None or self._stored is None:
            return self._raw(key)
        return self._stored.open(key, {name: self._raw(part) for name, part in parts.items()})

    def _raw(self, key: str) -> StoredSlice:
        found: StoredSlice = self._files[self._keys[key]].get_slice(key)
        return found

    def path_of(self, key: str) -> Path:
        return self.folder / self.file_of[key]


@contextmanager
def open_checkpoint(model_dir: Path, stored: StoredFormat | None = None) -> Iterator[Checkpoint]:
    """Map the files of the checkpoint in `model_dir`, or of that GGUF model; they are unmapped on exit. Raises
    ModelError."""
    if is_gguf(model_dir):
        yield Checkpoint(model_dir.parent, {model_dir.name: GgufTensors(model_dir)}, about="its metadata")
        return
    from safetensors import SafetensorError, safe_open

    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for name in weight_files(model_dir):
            path = model_dir / name
            try:
                files[name] = stack.enter_context(safe_open(str(path), framework="pt", device="cpu"))
            except FileNotFoundError as error:
                raise ModelError(
                    f"{path} does not exist", why=f"{INDEX_NAME} names it", todo="download the model again"
                ) from error
            except (SafetensorError, OSError) as error:
                raise ModelError(
                    f"{path} is damaged", why=str(error), todo="download the model again; the file may be cut short"
                ) from error
        yield Checkpoint(model_dir, files, stored)


def _check_keys(checkpoint: Checkpoint, parameters: list[Parameter], ignored: set[str]) -> None:
    present = set(checkpoint.file_of)
    wanted = {key for parameter in parameters for part in parameter.parts_in(present) for key in part.keys}
    extra = {key for key in present - wanted - ignored if not key.endswith("rotary_emb.inv_freq")}
    for problem, keys in (("is missing", wanted - present), ("has unexpected", extra)):
        if keys:
            named = ", ".join(sorted(keys)[:_NAMED]) + (" …" if len(keys) > _NAMED else "")
            raise ModelError(
                f"the checkpoint in {checkpoint.folder} {problem} {len(keys)} tensors", why=named,
                todo="check that config.json and the weights belong together",
            )  # fmt: skip


def _fill(
    checkpoint: Checkpoint, parameter: Parameter, part: TensorPart, target: Tensor, tp_rank: int, tp_size: int
) -> int:
    """Copy this rank's slice of `part` to the head of `target`; returns the rows written."""
    from safetensors import SafetensorError

    path, mine = checkpoint.path_of(part.key), _slices(parameter, part, tp_rank, tp_size)
    try:
        if part.source is None:
            data: Tensor = checkpoint.slice_of(part.key, _stored_shape(parameter, part))[_index(part, mine)]
        else:
            data = part.source.read(checkpoint, mine[0], mine[-1], target.dtype)
    except SafetensorError as error:
        raise ModelError(f"{part.key} in {path} cannot be read", why=str(error), todo="download it again") from error
    except (TypeError, ValueError, IndexError, RuntimeError) as error:  # torch's own for numbers of a wrong dtype
        raise ModelError(
            f"{part.key} in {path} cannot be unpacked", why=str(error), todo="download it again"
        ) from error
    if not data.is_floating_point() or data.element_size() == 1:
        raise ModelError(
            f"{part.key} in {path} is {data.dtype}",
            why="nothing in config.json says how it is to be read",
            todo="use the model's complete config.json, or plain weights",
        )
    count = _rows(part, parameter.split, tp_size)
    target[: data.shape[0]].copy_(data)
    target[data.shape[0] : count].zero_()
    return count


def _stored_shape(parameter: Parameter, part: TensorPart) -> tuple[int, ...]:
    columns = () if parameter.columns is None else (parameter.columns,)
    return (part.rows, *columns) if part.entry is None else (part.entry.of, part.entry.stored_rows, *columns)


def _slices(parameter: Parameter, part: TensorPart, tp_rank: int, tp_size: int) -> list[slice]:
    """The rows (and columns) of a part that rank `tp_rank` holds."""
    if parameter.split in (TensorSplit.ROWS, TensorSplit.PADDED_ROWS):
        rows = _rows(part, parameter.split, tp_size)
        first = min(tp_rank // part.replicas * rows, part.rows)
        chosen = [slice(first, min(first + rows, part.rows))]
    else:
        chosen = [slice(0, part.rows)]
    if parameter.columns is not None:
        columns = parameter.columns // tp_size if parameter.split is TensorSplit.COLUMNS else parameter.columns
        first = tp_rank * columns if parameter.split is TensorSplit.COLUMNS else 0
        chosen.append(slice(first, first + columns))
    return chosen


def _index(part: TensorPart, slices: list[slice]) -> tuple[int | slice, ...]:
    """Where `slices` of the part are in its checkpoint tensor."""
    if part.entry is None:
        return tuple(slices)
    rows, offset = slices[0], part.entry.first_row
    return (part.entry.index, slice(rows.start + offset, rows.stop + offset), *slices[1:])


def _rows(part: TensorPart, split: TensorSplit, tp_size: int) -> int:
    """Rows of `part` on one rank, padding included."""
    if split is TensorSplit.PADDED_ROWS:
        return -(-part.rows // tp_size)
    return _share(part.rows, tp_size // part.replicas, split is TensorSplit.ROWS)


def _share(size: int, shares: int, is_split: bool) -> int:
    if not is_split:
        return size
    if size % shares:
        raise ValueError(f"{size} cannot be split over {shares} ranks")
    return size // shares
