"""Copies of a GGUF model with all matrices in another type, so that every server reads the same numbers."""

from __future__ import annotations

from pathlib import Path


def requantise(model: Path, kind: str, out: Path) -> None:
    """Write `model` with every matrix as `kind`, a type of the `gguf` package; metadata and vectors stay."""
    import gguf

    reader = gguf.GGUFReader(model)
    architecture = reader.fields[gguf.Keys.General.ARCHITECTURE].contents()
    writer = gguf.GGUFWriter(out, architecture)
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != gguf.Keys.General.ARCHITECTURE:
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
    wanted = gguf.GGMLQuantizationType[kind]
    for tensor in reader.tensors:
        if len(tensor.shape) > 1:
            numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            writer.add_tensor(tensor.name, gguf.quants.quantize(numbers, wanted), raw_dtype=wanted)
        else:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
