"""Mutations of a packed checkpoint: settings, shapes, dtypes and places that lie, tensors that are gone, numbers."""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SETTINGS: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 5, 7, 16, 33, 127, 4096, 1 << 31, 1 << 40, 1 << 63, 1 << 64, 0.5, 1e30,
    float("nan"), float("inf"), "", "x", "gemm", "group", "block", "channel", "re:.*", "re:(", [], [0, 0], [1], [-1, 4],
    [1 << 40, 1], {}, {"x": 1},
)  # fmt: skip
_SIZES = (0, 1, 2, 3, 5, 8, 63, 64, 65, 128, 4096, 1 << 20, 1 << 31, 1 << 40, 1 << 62, -1)
_DTYPES = ("F32", "F16", "BF16", "F64", "I32", "I64", "I16", "I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", "X9")
_BYTES = {
    "F32": 4, "F16": 2, "BF16": 2, "F64": 8, "I32": 4, "I64": 8, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1,
    "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip
_MOST_BYTES = 1 << 20
_WRONG = (
    b"\x00\x00\xc0\x7f",
    b"\x00\x00\x80\x7f",
    b"\x00\x7e\x00\x7e",
    b"\xff\xff\xff\xff",
    b"\x7f\x7f\x7f\x7f",
    bytes(4),
)


@dataclass(slots=True)
class Checkpoint:
    """config.json and the one safetensors file of a checkpoint; `tail` cuts so many bytes off the file."""

    config: dict[str, Any]
    header: dict[str, Any]
    data: bytearray
    tail: int = 0

    @classmethod
    def read(cls, folder: Path) -> Checkpoint:
        whole = (folder / "model.safetensors").read_bytes()
        (size,) = struct.unpack("<Q", whole[:8])
        header = json.loads(whole[8 : 8 + size])
        return cls(json.loads((folder / "config.json").read_text()), header, bytearray(whole[8 + size :]))

    def copy(self) -> Checkpoint:
        return Checkpoint(copy.deepcopy(self.config), copy.deepcopy(self.header), bytearray(self.data))

    def write(self, folder: Path) -> None:
        """New files: a mapped one must not be changed."""
        header = json.dumps(self.header).encode()
        whole = struct.pack("<Q", len(header)) + header + self.data
        for name, content in (
            ("model.safetensors", whole[: len(whole) - self.tail]), ("config.json", json.dumps(self.config).encode()),
        ):  # fmt: skip
            (folder / name).unlink(missing_ok=True)
            (folder / name).write_bytes(content)

    def packed(self, drawn: random.Random) -> str:
        """The key of a tensor, mostly of one that belongs to a packed weight."""
        keys = [key for key in self.header if key != "__metadata__"]
        parts = [key for key in keys if "_proj." in key]
        return drawn.choice(parts if parts and drawn.random() < 0.95 else keys)


Mutate = Callable[[random.Random, Checkpoint], None]


def _setting(drawn: random.Random, of: Checkpoint) -> None:
    """Another value, no value, or another name, somewhere in quantization_config."""
    places: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        for key, inner in list(value.items() if isinstance(value, dict) else enumerate(value)):
            places.append((value, key))
            if isinstance(inner, dict | list):
                walk(inner)

    walk(of.config["quantization_config"])
    if not places:
        return
    within, key = drawn.choice(places)
    choice = drawn.random()
    if choice < 0.7:
        within[key] = copy.deepcopy(drawn.choice(_SETTINGS))
    elif isinstance(within, dict):
        value = within.pop(key)
        if choice < 0.85:
            within[drawn.choice(("bits", "group_size", "dynamic", "format", "block_structure", "x"))] = value


def _added(drawn: random.Random, of: Checkpoint) -> None:
    """A setting that the form has or has not."""
    name = drawn.choice(
        ("desc_act", "sym", "dynamic", "weight_block_size", "fmt", "version", "zero_point", "group_size", "bits",
         "checkpoint_format", "modules_to_not_convert", "ignore", "config_groups", "quant_method", "load_in_8bit")
    )  # fmt: skip
    of.config["quantization_config"][name] = copy.deepcopy(drawn.choice(_SETTINGS))


def _shape(drawn: random.Random, of: Checkpoint) -> None:
    shape = of.header[of.packed(drawn)]["shape"]
    choice = drawn.random()
    if choice < 0.3:
        shape.reverse()
    elif choice < 0.5:
        shape.append(1)
    elif choice < 0.7 and shape:
        del shape[drawn.randrange(len(shape))]
    elif shape:
        shape[drawn.randrange(len(shape))] = drawn.choice(_SIZES)


def _resized(drawn: random.Random, of: Checkpoint) -> None:
    """Another shape with as many bytes as it needs, behind the others."""
    entry = of.header[of.packed(drawn)]
    _shape_of_sense(drawn, entry["shape"])
    size = max(0, min(_MOST_BYTES, _count(entry["shape"]) * _BYTES.get(entry["dtype"], 0)))
    entry["data_offsets"] = [len(of.data), len(of.data) + size]
    of.data += drawn.randbytes(min(size, 64)) + bytes(max(0, size - 64))


def _shape_of_sense(drawn: random.Random, shape: list[int]) -> None:
    if shape:
        shape[drawn.randrange(len(shape))] = drawn.choice((0, 1, 2, 3, 31, 33, 64, 127, 129))


def _count(shape: list[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _dtype(drawn: random.Random, of: Checkpoint) -> None:
    of.header[of.packed(drawn)]["dtype"] = drawn.choice(_DTYPES)


def _places(drawn: random.Random, of: Checkpoint) -> None:
    offsets = of.header[of.packed(drawn)]["data_offsets"]
    offsets[drawn.randrange(2)] += drawn.choice((-64, -4, -1, 1, 4, 64, 1 << 40, -(1 << 40)))


def _gone(drawn: random.Random, of: Checkpoint) -> None:
    del of.header[of.packed(drawn)]


def _renamed(drawn: random.Random, of: Checkpoint) -> None:
    key = of.packed(drawn)
    entry = of.header.pop(key)
    of.header[drawn.choice((key + "x", key.replace("q_proj", "x_proj"), key.rpartition(".")[0] + ".weight", "x"))] = (
        entry
    )


def _swapped(drawn: random.Random, of: Checkpoint) -> None:
    first, second = of.packed(drawn), of.packed(drawn)
    of.header[first], of.header[second] = of.header[second], of.header[first]


def _numbers(drawn: random.Random, of: Checkpoint) -> None:
    """Not a number, infinite, or wrong, anywhere in a tensor."""
    first, last = of.header[of.packed(drawn)]["data_offsets"]
    if first >= 0 and last - first >= 4 and last <= len(of.data):
        at = first + drawn.randrange(0, last - first - 3, 4)
        of.data[at : at + 4] = drawn.choice(_WRONG)


def _noise(drawn: random.Random, of: Checkpoint) -> None:
    first, last = of.header[of.packed(drawn)]["data_offsets"]
    if 0 <= first < last <= len(of.data):
        of.data[first:last] = drawn.randbytes(last - first)


def _state(drawn: random.Random, of: Checkpoint) -> None:
    """Of bitsandbytes the state is JSON in bytes; of compressed-tensors a weight's shape is a tensor."""
    keys = [key for key in of.header if "quant_state" in key or key.endswith("weight_shape")]
    if not keys:
        return _numbers(drawn, of)
    entry = of.header[drawn.choice(keys)]
    first, last = entry["data_offsets"]
    if not 0 <= first < last <= len(of.data):
        return None
    if entry["dtype"] != "U8":
        of.data[first:last] = struct.pack("<q", drawn.choice(_SIZES)) * ((last - first) // 8)
        return None
    try:
        state = json.loads(of.data[first:last])
        state[drawn.choice(list(state))] = drawn.choice(_SETTINGS)
    except (ValueError, TypeError, IndexError):
        return None
    content = json.dumps(state).encode()
    entry["shape"], entry["data_offsets"] = [len(content)], [len(of.data), len(of.data) + len(content)]
    of.data += content
    return None


def _cut(drawn: random.Random, of: Checkpoint) -> None:
    of.tail = drawn.randrange(1, len(of.data) + 16)


MUTATIONS: dict[str, Mutate] = {
    "setting": _setting, "added": _added, "shape": _shape, "resized": _resized, "dtype": _dtype, "places": _places,
    "gone": _gone, "renamed": _renamed, "swapped": _swapped, "numbers": _numbers, "noise": _noise, "state": _state,
    "cut": _cut,
}  # fmt: skip


def mutate(drawn: random.Random, of: Checkpoint) -> str:
    """Apply one to three mutations; returns their names. safetensors itself refuses holes and bytes that do not fit a
    shape: four times in five they are laid one after the other again, cut or filled up."""
    names = [drawn.choice(list(MUTATIONS)) for _ in range(drawn.choice((1, 1, 2, 3)))]
    for name in names:
        if len(of.header) > 2 and isinstance(of.config["quantization_config"], dict):
            MUTATIONS[name](drawn, of)
    if drawn.random() < 0.8 and "places" not in names:
        _laid_again(of)
    return "+".join(names)


def _laid_again(of: Checkpoint) -> None:
    data = bytearray()
    for key, entry in of.header.items():
        if key != "__metadata__":
            first, last = entry["data_offsets"]
            begin, size = len(data), _count(entry["shape"]) * _BYTES.get(entry["dtype"], 0)
            piece = of.data[max(0, first) : max(0, last)]
            if 0 <= size <= _MOST_BYTES:
                piece = piece[:size] + bytes(max(0, size - len(piece)))
            data += piece
            entry["data_offsets"] = [begin, len(data)]
    of.data = data
