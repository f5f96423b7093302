"""GGUF files are read as the `gguf` package writes them; what is cut, wrong or hostile ends in one line."""

import random
import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy
import pytest

from tandem.core.errors import ModelError
from tandem.core.gguf.file import GgufFile
from tandem.core.gguf.model_files import GgufModel, gguf_files, gguf_in, model_name
from tandem.core.gguf.types import TENSOR_TYPES
from tests.unit.core.gguf_bytes import ARRAY, F32, TEXT, Bytes, key_array, key_text, key_u32, tensor, text

MANY = 1 << 62


def written(folder: Path, name: str = "model.gguf", **split: int) -> Path:
    """A file with a value of each kind and tensors of several types, by the package."""
    path = folder / name
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=split.get("most", 0))
    writer.add_uint8("a.u8", 200)
    writer.add_int8("a.i8", -3)
    writer.add_uint16("a.u16", 60_000)
    writer.add_int16("a.i16", -300)
    writer.add_uint32("a.u32", 4_000_000_000)
    writer.add_int32("a.i32", -70_000)
    writer.add_uint64("a.u64", 1 << 60)
    writer.add_int64("a.i64", -(1 << 60))
    writer.add_float32("a.f32", 0.5)
    writer.add_float64("a.f64", 1e300)
    writer.add_bool("a.yes", True)
    writer.add_string("a.text", "für 語 🙂")
    writer.add_array("a.texts", ["", "▁the", "ü"])
    writer.add_array("a.wholes", [1, 2, -3])
    writer.add_array("a.numbers", [0.5, -1.5])
    writer.add_array("a.flags", [True, False])
    numbers = numpy.arange(512, dtype=numpy.float32).reshape(2, 256)
    for number, kind in enumerate(("F32", "F16", "Q8_0", "Q4_0", "Q8_0")):
        chosen = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(f"blk.{number}.{kind}", gguf.quants.quantize(numbers, chosen), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_values_are_read_as_the_package_wrote_them(tmp_path: Path) -> None:
    metadata = GgufFile(written(tmp_path)).metadata
    wholes = {"u8": 200, "i8": -3, "u16": 60_000, "i16": -300, "u32": 4_000_000_000, "i32": -70_000, "u64": 1 << 60}
    for name, value in {**wholes, "i64": -(1 << 60)}.items():
        assert metadata.whole(f"a.{name}") == value
    assert metadata.number("a.f32") == 0.5
    assert metadata.number("a.f64") == 1e300
    assert metadata.number("a.u8") == 200.0
    assert metadata.flag("a.yes", False) is True
    assert metadata.text("a.text") == "für 語 🙂"
    assert metadata.texts("a.texts") == ["", "▁the", "ü"]
    assert metadata.wholes("a.wholes") == [1, 2, -3]
    assert metadata.numbers("a.numbers") == [0.5, -1.5]
    assert metadata.flags("a.flags") == [True, False]
    assert (metadata.text("b"), metadata.whole("b", 7), metadata.flag("b", True)) == ("", 7, True)
    assert (metadata.texts("b"), metadata.numbers("b")) == ([], [])
    assert "a.u8" in metadata
    assert metadata.is_array("a.flags")


@pytest.mark.parametrize("wrong", ["whole", "number", "flag", "texts", "numbers", "flags"])
def test_a_value_of_another_kind_is_named(wrong: str, tmp_path: Path) -> None:
    metadata = GgufFile(written(tmp_path)).metadata
    arguments = ("a.text", False) if wrong == "flag" else ("a.text",)
    with pytest.raises(ModelError, match=r"model\.gguf: a\.text cannot be used: it must be"):
        getattr(metadata, wrong)(*arguments)
    with pytest.raises(ModelError, match=r"a\.u8 cannot be used: it must be a text"):
        metadata.text("a.u8")


def test_the_directory_is_the_package_s(tmp_path: Path) -> None:
    path = written(tmp_path)
    ours, theirs = GgufFile(path), gguf.GGUFReader(path)
    assert list(ours.tensors) == [one.name for one in theirs.tensors]
    for one in theirs.tensors:
        found = ours.tensors[one.name]
        assert found.shape == tuple(reversed(one.shape.tolist())) == (2, 256)
        assert (found.kind.name, found.size) == (one.tensor_type.name, one.n_bytes)
        assert found.row_bytes * 2 == found.size
        assert bytes(ours.bytes_of(found)) == one.data.tobytes()


def test_the_types_are_the_package_s() -> None:
    known = {int(kind): (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert {number: tuple(kind) for number, kind in TENSOR_TYPES.items() if number in known} == {
        number: sizes for number, sizes in known.items() if number in TENSOR_TYPES
    }
    assert set(TENSOR_TYPES) <= set(known)


def test_a_model_of_several_files_is_read_as_one(tmp_path: Path) -> None:
    written(tmp_path, "big.gguf", most=2)
    first = gguf_in(tmp_path)
    assert first is not None
    assert [path.name for path in gguf_files(first)] == [f"big-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    assert model_name(first) == "big"
    model, alone = GgufModel(first), GgufFile(written(tmp_path, "alone.gguf"))
    assert set(model.file_of) == set(alone.tensors)
    for name, found in alone.tensors.items():
        assert bytes(model.file_of[name].bytes_of(model.tensor(name))) == bytes(alone.bytes_of(found))
    with pytest.raises(ModelError, match=r"has 2 GGUF models: alone\.gguf, big-00001-of-00003\.gguf"):
        gguf_in(tmp_path)
    with pytest.raises(ModelError, match=r"not the first file.*Give big-00001-of-00003\.gguf"):
        GgufModel(tmp_path / "big-00002-of-00003.gguf")
    (tmp_path / "big-00003-of-00003.gguf").unlink()
    with pytest.raises(ModelError, match=r"cannot read .*big-00003-of-00003\.gguf: No such file"):
        GgufModel(first)


def test_files_of_different_models_are_told_apart(tmp_path: Path) -> None:
    written(tmp_path, "big.gguf", most=2)
    second, third = (tmp_path / f"big-0000{number}-of-00003.gguf" for number in (2, 3))
    third.write_bytes(second.read_bytes())
    with pytest.raises(ModelError, match="says that it is number 1 of 3, its name that it is number 2 of 3"):
        GgufModel(tmp_path / "big-00001-of-00003.gguf")
    alone = written(tmp_path, "alone.gguf")
    renamed = alone.rename(tmp_path / "other-00001-of-00001.gguf")
    assert len(GgufModel(renamed).file_of) == 5
    moved = second.rename(tmp_path / "second.gguf")
    with pytest.raises(ModelError, match="does not belong to its model"):
        GgufModel(moved)


NESTED = struct.pack("<IQ", ARRAY, 1)
WRONG = {
    "no magic": (Bytes(magic=b"GGML"), "is not a GGUF file: it begins with b'GGML'"),
    "version 1": (Bytes(version=1), "version 1, and 2 and 3 are read"),
    "big endian": (Bytes(version=3 << 24), "of a big-endian machine"),
    "keys without end": (Bytes(key_count=MANY), "metadata entries"),
    "tensors without end": (Bytes(tensor_count=MANY), f"has {MANY} tensors"),
    "more keys than bytes": (Bytes(key_count=100), "100 metadata entries"),
    "more tensors than bytes": (Bytes(tensor_count=1000, data=b""), "1000 tensors"),
    "a key without end": (Bytes(keys=[struct.pack("<Q", MANY)]), "a metadata key has"),
    "a key with a line end": (Bytes(keys=[key_u32("a\nb", 1)]), r"a metadata key is 'a\\nb'"),
    "a key of no UTF-8": (Bytes(keys=[text(b"\xff") + struct.pack("<II", 4, 1)]), "no UTF-8"),
    "a text without end": (Bytes(keys=[text("a") + struct.pack("<IQ", TEXT, MANY)]), "bytes are named at byte"),
    "a key twice": (Bytes(keys=[key_u32("a", 1), key_u32("a", 2)]), "it has a twice"),
    "an unknown kind": (Bytes(keys=[text("a") + struct.pack("<I", 13)]), "a is of type 13"),
    "a flag of 2": (Bytes(keys=[text("a") + struct.pack("<IB", 7, 2)]), "a is 2, and must be 0 or 1"),
    "an array without end": (Bytes(keys=[key_array("a", F32, MANY, b"")]), "bytes are named at byte"),
    "texts without end": (Bytes(keys=[key_array("a", TEXT, MANY, b"")]), f"a says that it has {MANY} elements"),
    "too deep": (Bytes(keys=[key_array("a", ARRAY, 1, NESTED * 9)]), "more than 4 deep"),
    "an odd alignment": (Bytes(keys=[key_u32("general.alignment", 24)]), "alignment is 24"),
    "no alignment": (Bytes(keys=[key_u32("general.alignment", 0)]), "alignment is 0"),
    "no dimension": (Bytes(tensors=[tensor("t", ())]), "t has 0 dimensions"),
    "five dimensions": (Bytes(tensors=[tensor("t", (1,) * 5)]), "t has 5 dimensions"),
    "an empty tensor": (Bytes(tensors=[tensor("t", (0, 4))]), r"t is \[4, 0\]"),
    "a part of a block": (Bytes(tensors=[tensor("t", (40, 2), kind=2)]), "blocks of 32 numbers"),
    "an unknown type": (Bytes(tensors=[tensor("t", (4,), kind=99)]), "t is of type 99"),
    "behind the end": (Bytes(tensors=[tensor("t", (4,), offset=MANY)]), "t takes bytes"),
    "larger than all memory": (Bytes(tensors=[tensor("t", (MANY, MANY, MANY, MANY))]), "t takes bytes"),
    "not aligned": (Bytes(tensors=[tensor("t", (4,), offset=4)]), "not aligned to 32 bytes"),
    "two of a name": (Bytes(tensors=[tensor("t", (4,)), tensor("t", (4,))]), "two tensors t"),
    "shared bytes": (Bytes(tensors=[tensor("t", (4,)), tensor("u", (4,))]), "t and u share bytes"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name: str, tmp_path: Path) -> None:
    made, why = WRONG[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(made.made())
    with pytest.raises(ModelError, match=why) as caught:
        GgufFile(path)
    assert "\n" not in caught.value.message
    assert caught.value.todo


def test_a_right_file_by_hand_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(Bytes(keys=[key_text("a", "b"), key_array("c", ARRAY, 1, struct.pack("<IQ", F32, 0))]).made())
    file = GgufFile(path)
    assert file.metadata.text("a") == "b"
    assert file.tensors["token_embd.weight"].shape == (2, 4)
    with pytest.raises(ModelError, match="it must be an array of numbers"):
        file.metadata.numbers("c")


def test_a_file_cut_anywhere_ends_in_a_line(tmp_path: Path) -> None:
    whole = written(tmp_path).read_bytes()
    path = tmp_path / "cut.gguf"
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            GgufFile(path)


def test_mutations_end_in_a_line_or_in_a_file_and_take_no_memory(tmp_path: Path) -> None:
    whole, drawn = written(tmp_path).read_bytes(), random.Random(5)
    path = tmp_path / "mutated.gguf"
    read, lines = 0, list[str]()
    tracemalloc.start()
    try:
        for _ in range(400):
            bad = bytearray(whole)
            for _ in range(drawn.randint(1, 4)):
                at = drawn.randrange(4, 1100)
                bad[at : at + 8] = drawn.choice([drawn.randbytes(1), b"\xff" * 8, struct.pack("<Q", 1 << 40)])
            path.write_bytes(bad)
            try:
                GgufFile(path)
                read += 1
            except ModelError as error:
                lines.append(error.message)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert min(read, len(lines)) > 20
    assert not [line for line in lines if "\n" in line]
    assert peak < 4 << 20
