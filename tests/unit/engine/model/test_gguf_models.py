"""A model as GGUF has the logits of its safetensors, in every family and over ranks; blocks are as the oracle reads."""

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.core.errors import ModelError
from tandem.core.gguf.model_files import gguf_in
from tandem.engine.gguf.dequantize import DEQUANTIZE
from tandem.engine.gguf.tensors import GgufSlice, GgufTensors
from tandem.engine.model_config import read_model_config
from tandem.engine.model_source import (
    ModelSource,
    fingerprint,
    local_model,
    sim_fingerprint,
    tokenizer_digest,
    weight_files,
)  # fmt: skip
from tandem.engine.models.decoder import Decoder
from tandem.engine.parallel import SingleRank
from tandem.engine.runner import ModelRunner
from tests.unit.engine.model.driver import Driver, random_tokens
from tools.gguf_model import GgufModel, write_gguf

FAMILIES = ("bundled", "llama", "llama-biases", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3",
            "gpt_oss", "deepseek_v2", "deepseek_v3")  # fmt: skip
NO_KEY: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 16}, "gemma3": {"query_pre_attn_scalar": 16}, "gpt_oss": {"swiglu_limit": 7.0},
    "deepseek_v3": {"rope_scaling": {
        "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "mscale": 1.2, "mscale_all_dim": 1.2,
    }},
}  # fmt: skip
"""Facts that no metadata holds; files of these families have it so."""
WRITTEN = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4")
"""Types that the package writes."""


class Alone(SingleRank):
    """A rank whose others never came: it can load, for that needs no other rank."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size = rank, size


def runner(path: Path) -> ModelRunner:
    return ModelRunner(model_dir=path, dtype="float32", num_blocks=32, max_model_len=256)


def rewritten(folder: Path, to: Path, **config: Any) -> Path:
    """A copy of a model with other fields in its config."""
    shutil.copytree(folder, to)
    values = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(values | config))
    return to


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_the_safetensors(name: str, model_folder: Any, tmp_path: Path) -> None:
    folder = model_folder(name)
    if name in NO_KEY:
        folder = rewritten(folder, tmp_path / "folder", **NO_KEY[name])
    write_gguf(folder, tmp_path / "model.gguf")
    ours, plain = runner(tmp_path / "model.gguf"), runner(folder)
    assert ours.config.is_tied == plain.config.is_tied
    assert ours.config.describe_rope() == plain.config.describe_rope()
    tokens = random_tokens(100, plain.vocab_size)
    found, want = (Driver(one).step({"a": tokens})["a"] for one in (ours, plain))
    torch.testing.assert_close(found, want, atol=1e-6 if "gemma" in name else 0, rtol=0)


def test_a_latent_in_one_piece_is_the_same_model(model_folder: Any, tmp_path: Path) -> None:
    """As files were before llama.cpp cut it in two."""
    found = []
    for is_whole in (False, True):
        path = tmp_path / f"{is_whole}.gguf"
        write_gguf(model_folder("deepseek_v2"), path, GgufModel(has_whole_latent=is_whole))
        assert ("blk.0.attn_kv_b.weight" in {one.name for one in gguf.GGUFReader(path).tensors}) is is_whole
        found.append(Driver(runner(path)).step({"a": list(range(60))})["a"])
    assert found[0].equal(found[1])


def test_packed_experts_are_those_of_the_checkpoint(model_folder: Any, tmp_path: Path) -> None:
    """gpt-oss as it is published: MXFP4 in both, repacked as llama.cpp's converter does, to the bit."""
    folder = rewritten(
        model_folder("gpt_oss"), tmp_path / "folder", swiglu_limit=7.0, quantization_config={"quant_method": "mxfp4"}
    )
    tensors, drawn = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(5)
    for key in [key for key in tensors if key.endswith(("gate_up_proj", "down_proj"))]:
        count, inputs, outputs = tensors.pop(key).shape
        shape = (count, outputs, inputs // 32)
        tensors[f"{key}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=drawn, dtype=torch.uint8)
        tensors[f"{key}_scales"] = torch.randint(120, 125, shape, generator=drawn, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors")
    path = tmp_path / "model.gguf"
    write_gguf(folder, path, GgufModel(kind="Q8_0"))
    stored = {one.name: one for one in gguf.GGUFReader(path).tensors}
    found = GgufTensors(path)
    for name, part in (("gate_proj", "gate"), ("up_proj", "up"), ("down_proj", "down")):
        one = stored[f"blk.1.ffn_{part}_exps.weight"]
        want = gguf.quants.dequantize(one.data, one.tensor_type)
        for expert in range(8):
            ours = found.get_slice(f"model.layers.1.mlp.experts.{expert}.{name}.weight")[0:999, 0:999]
            assert (ours.numpy() == want[expert]).all()
    write_gguf(folder, path)
    ours, plain = (Driver(runner(one)).step({"a": list(range(60))})["a"] for one in (path, folder))
    assert ours.equal(plain)


@pytest.mark.parametrize("scaling", [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 8192},
    {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 8192},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
], ids=lambda scaling: f"{scaling['rope_type']}-{scaling['factor']}")  # fmt: skip
def test_stretched_rotations_are_the_same(scaling: dict[str, Any], model_folder: Any, tmp_path: Path) -> None:
    folder = rewritten(model_folder("llama"), tmp_path / "folder", rope_scaling=scaling)
    write_gguf(folder, tmp_path / "model.gguf")
    assert read_model_config(tmp_path / "model.gguf").rope == read_model_config(folder).rope


def test_other_factors_of_frequencies_are_refused(model_folder: Any, tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 2.0,
               "original_max_position_embeddings": 4096}  # fmt: skip
    folder = rewritten(model_folder("llama"), tmp_path / "folder", rope_scaling=scaling)
    write_gguf(folder, tmp_path / "model.gguf")
    with pytest.raises(ModelError, match=r"rope_freqs\.weight is none of a Llama 3"):
        read_model_config(tmp_path / "model.gguf")


@pytest.mark.parametrize("kind", WRITTEN)
def test_quantised_weights_are_what_the_package_reads(kind: str, model_folder: Any, tmp_path: Path) -> None:
    """Every tensor of a Llama: names, order of rows, and each number to the bit."""
    folder, path = model_folder("llama"), tmp_path / "model.gguf"
    write_gguf(folder, path, GgufModel(kind=kind))
    assert kind in DEQUANTIZE
    want = {
        one.name: gguf.quants.dequantize(one.data, one.tensor_type).reshape(tuple(reversed(one.shape.tolist())))
        for one in gguf.GGUFReader(path).tensors
    }
    names = {one: f"blk.1.{name}.weight" for one, name in {
        "self_attn.v_proj": "attn_v", "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    }.items()}  # fmt: skip
    tensors = GgufTensors(path)
    for name, stored in names.items():
        found = tensors.get_slice(f"model.layers.1.{name}.weight")[tuple(slice(0, 99999) for _ in want[stored].shape)]
        assert (found.float().numpy() == want[stored]).all()
    turned = torch.from_numpy(want["blk.1.attn_k.weight"].copy())  # [2 heads of 16, 64]
    undone = turned.view(2, 8, 2, 64).transpose(1, 2).reshape(32, 64)
    slices = tensors.get_slice("model.layers.1.self_attn.k_proj.weight")
    assert slices[0:32, 0:64].float().equal(undone)
    assert slices[5:21, 7:45].float().equal(undone[5:21, 7:45])
    assert slices[8:8, 0:64].shape == (0, 64)


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_read_their_share_alone(
    name: str, size: int, model_folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every matrix, as many numbers as they keep, and the same as of the safetensors."""
    folder, path = model_folder(name), tmp_path / "model.gguf"
    write_gguf(folder, path)
    read, numbers = 0, GgufSlice._numbers

    def counted(self: GgufSlice, rows: Any, start: int, stop: int) -> torch.Tensor:
        nonlocal read
        read += len(rows) * (stop - start) * (len(self.get_shape()) > 1)
        return numbers(self, rows, start, stop)

    monkeypatch.setattr(GgufSlice, "_numbers", counted)
    for rank in range(size):
        made = []
        for source in (path, folder):
            decoder = Decoder(read_model_config(source), dtype=torch.float32, max_positions=64, group=Alone(rank, size))
            kept = [one.tensor.numel() for one in decoder.parameters() if one.columns is not None]
            shares: list[torch.Tensor] = []
            decoder._quantize = lambda one, to=shares: to.append(one.tensor.clone())  # type: ignore[method-assign,misc]
            decoder.load(source)
            made.append(shares)
        assert read == sum(kept)
        read = 0
        assert all(one.equal(other) for one, other in zip(*made, strict=True))


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3_moe"])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_get_their_slices_of_blocks(name: str, size: int, model_folder: Any, tmp_path: Path) -> None:
    """Columns of a rank need not be whole blocks."""
    path, plain = tmp_path / "model.gguf", tmp_path / "plain"
    write_gguf(model_folder(name), path, GgufModel(kind="Q8_0"))
    shutil.copytree(model_folder(name), plain)
    tensors = GgufTensors(path)
    whole = {key: tensors.get_slice(key) for key in tensors.keys()}  # noqa: SIM118 - no mapping
    save_file(
        {key: one[tuple(slice(0, size) for size in one.get_shape())].contiguous() for key, one in whole.items()},
        plain / "model.safetensors",
    )
    for rank in range(size):
        made = []
        for source in (path, plain):
            decoder = Decoder(read_model_config(source), dtype=torch.float32, max_positions=64, group=Alone(rank, size))
            shares: list[torch.Tensor] = []
            decoder._quantize = lambda one, kept=shares: kept.append(one.tensor.clone())  # type: ignore[method-assign,misc]
            decoder.load(source)
            made.append(shares)
        assert all(one.equal(other) for one, other in zip(*made, strict=True))


def test_blocks_can_be_had_as_they_are(model_folder: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(model_folder("llama"), path, GgufModel(kind="Q4_0"))
    one = GgufTensors(path).get_slice("model.layers.0.self_attn.q_proj.weight")
    assert isinstance(one, GgufSlice)
    blocks = one.blocks(slice(16, 48), slice(32, 64))
    assert (one.kind, blocks.shape, blocks.dtype) == ("Q4_0", (32, 18), torch.uint8)
    assert DEQUANTIZE["Q4_0"](blocks).equal(one[16:48, 32:64])
    with pytest.raises(ValueError, match="columns 16 to 64 do not align with blocks of 32"):
        one.blocks(slice(0, 1), slice(16, 64))


def test_split_files_are_one_model(model_folder: Any, tmp_path: Path) -> None:
    write_gguf(model_folder("qwen3"), tmp_path / "big.gguf", GgufModel(split_tensors=5))
    source = local_model(str(tmp_path))
    assert source is not None
    assert (source.name, source.path) == ("big", gguf_in(tmp_path.resolve()))
    assert len(weight_files(source.path)) > 3
    found = Driver(runner(source.path)).step({"a": [5, 6, 7]})["a"]
    assert found.equal(Driver(runner(model_folder("qwen3"))).step({"a": [5, 6, 7]})["a"])


def test_a_file_and_its_folder_are_the_same_model(model_folder: Any, tmp_path: Path) -> None:
    folder, path = tmp_path / "folder", tmp_path / "folder" / "Tiny-1M.Q8_0.gguf"
    folder.mkdir()
    write_gguf(model_folder("llama"), path, GgufModel(kind="Q8_0"))
    source = local_model(str(path))
    assert source == local_model(str(folder)) == ModelSource(name="Tiny-1M.Q8_0", path=path.resolve())
    assert source is not None
    linked = tmp_path / "Name.gguf"
    linked.symlink_to(path)
    found = local_model(str(linked))
    assert found is not None
    assert found.name == "Name"
    with pytest.raises(ModelError, match="is a file and has no revisions"):
        local_model(str(path), revision="main")
    config = read_model_config(path)
    computed, sim = fingerprint(source, config, compute_dtype="float32"), sim_fingerprint(source, config)
    assert computed.tokenizer == sim.tokenizer == tokenizer_digest(path)
    other = tmp_path / "other.gguf"
    write_gguf(model_folder("llama"), other, GgufModel(kind="Q4_0"))
    assert tokenizer_digest(other) == tokenizer_digest(path)
    assert fingerprint(ModelSource(name=source.name, path=other), config, compute_dtype="float32") != computed
    shutil.copyfile(model_folder("llama") / "tokenizer.json", folder / "tokenizer.json")
    assert tokenizer_digest(path) != tokenizer_digest(other)


def _without(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.1.mlp.up_proj.weight"]


def test_a_missing_tensor_is_named(model_folder: Any, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(model_folder("llama"), folder)
    tensors = load_file(folder / "model.safetensors")
    _without(tensors)
    save_file(tensors, folder / "model.safetensors")
    write_gguf(folder, tmp_path / "model.gguf")
    with pytest.raises(ModelError, match=r"is missing 1 tensors: model\.layers\.1\.mlp\.up_proj\.weight"):
        runner(tmp_path / "model.gguf")


def _changed(path: Path, **values: Any) -> Path:
    """The same file with other metadata, by the package; tensors are left out but the embedding."""
    reader, out = gguf.GGUFReader(path), path.with_name("changed.gguf")
    family = str(reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(out, values.pop("architecture", family))
    for key, one in reader.fields.items():
        if key.startswith(f"{family}.") and key not in values:
            writer.add_key_value(key, one.contents(), one.types[0])
    for key, value in values.items():
        if value is not None:
            kinds = {int: "UINT32", float: "FLOAT32", str: "STRING", bool: "BOOL"}
            writer.add_key_value(key, value, gguf.GGUFValueType[kinds[type(value)]])
    for tensor in reader.tensors[:2]:
        writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"architecture": "mamba"}, "it is 'mamba', and Tandem computes llama, qwen2"),
    "unknown key": ({"llama.attention.clamp_kqv": 8.0}, "clamp_kqv cannot be used: llama is computed without it"),
    "window": ({"llama.attention.sliding_window": 64}, "llama is computed without it"),
    "no layers": ({"llama.block_count": None}, "block_count cannot be used: it is missing"),
    "zero layers": ({"llama.block_count": 0}, "it is 0, and must be 1 to"),
    "layers without end": ({"llama.block_count": 1 << 31}, "must be 1 to 2147483647"),
    "more layers than tensors": ({"llama.block_count": 1 << 20}, "and the file has 2 tensors"),
    "another width": ({"llama.embedding_length": 128}, r"it is 128, and token_embd\.weight is \[512, 64\]"),
    "a part of a head": ({"llama.rope.dimension_count": 8}, "heads have 16 numbers, all of which turn"),
    "a rotation": ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, "it is 'longrope'"),
    "no number": ({"llama.rope.freq_base": float("nan")}, "it is nan, and must be above 0"),
    "sees what is to come": ({"llama.attention.causal": False}, "those to come are not computed"),
}


REFUSED_LATENTS: dict[str, tuple[dict[str, Any], str]] = {
    "gating": ({"deepseek2.expert_gating_func": 3}, "it is 3, and 1 and 2 are computed"),
    "turns": ({"deepseek2.rope.dimension_count": 28}, "it is 28, and a head's query has 28 numbers"),
    "uneven groups": ({"deepseek2.expert_group_count": 3}, "8 experts in 3 groups, 2 of them chosen"),
    "no rank": ({"deepseek2.attention.kv_lora_rank": None}, "kv_lora_rank cannot be used: it is missing"),
    "an index": ({"deepseek2.attention.indexer.top_k": 4}, "deepseek2 is computed without it"),
}


@pytest.mark.parametrize("name", REFUSED_LATENTS)
def test_what_is_not_computed_of_a_latent_is_refused(name: str, model_folder: Any, tmp_path: Path) -> None:
    values, why = REFUSED_LATENTS[name]
    write_gguf(model_folder("deepseek_v3"), tmp_path / "model.gguf", GgufModel(has_tokenizer=False))
    with pytest.raises(ModelError, match=why):
        read_model_config(_changed(tmp_path / "model.gguf", **values))


def test_sizes_beyond_all_memory_are_refused_by_a_tensor(model_folder: Any, tmp_path: Path) -> None:
    write_gguf(model_folder("deepseek_v2"), tmp_path / "model.gguf", GgufModel(has_tokenizer=False))
    huge = {f"deepseek2.{name}": (1 << 31) - 1 for name in ("attention.head_count", "attention.key_length_mla")}
    config = read_model_config(_changed(tmp_path / "model.gguf", **huge))
    with pytest.raises(ModelError, match=r"self_attn\.kv_b_proj\.weight would be \[\d+, 32\]"):
        Decoder(config, dtype=torch.float32, max_positions=64)


def test_halves_of_a_latent_that_do_not_belong_together_are_named(model_folder: Any, tmp_path: Path) -> None:
    folder, path = tmp_path / "folder", tmp_path / "model.gguf"
    shutil.copytree(model_folder("deepseek_v2"), folder)
    write_gguf(folder, path)
    file = bytearray(path.read_bytes())
    at = file.index(b"blk.0.attn_v_b.weight")
    path.write_bytes(file.replace(b"blk.0.attn_v_b.weight", b"blk.9.attn_v_b.weight"))
    with pytest.raises(ModelError, match=r"has a tensor blk\.0\.attn_k_b\.weight"):
        GgufTensors(path)
    shape = at + len("blk.0.attn_v_b.weight") + 4  # innermost first: the rank, which turns into half of it
    file[shape : shape + 8] = (int.from_bytes(file[shape : shape + 8], "little") // 2).to_bytes(8, "little")
    path.write_bytes(file)
    with pytest.raises(ModelError, match=r"\[4, 32, 12\] and \[4, 20, 16\].*must be of the same heads and rank"):
        GgufTensors(path)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_computed_is_refused_by_its_key(name: str, model_folder: Any, tmp_path: Path) -> None:
    values, why = REFUSED[name]
    write_gguf(model_folder("llama"), tmp_path / "model.gguf", GgufModel(has_tokenizer=False))
    with pytest.raises(ModelError, match=why):
        read_model_config(_changed(tmp_path / "model.gguf", **values))
