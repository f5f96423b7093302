"""Loading is strict: every tensor is used and fits, damage is named, ranks get exactly their slices."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.core.errors import ModelError, StartupError
from tandem.engine.memory_plan import AutomaticKV, StepBounds
from tandem.engine.model_config import read_model_config
from tandem.engine.models.decoder import Decoder
from tandem.engine.models.mlp import MlpParameters
from tandem.engine.parallel import SingleRank
from tandem.engine.runner import ModelRunner
from tandem.engine.weights import Parameter, TensorPart, TensorSplit, load_weights

Tensors = dict[str, torch.Tensor]


class Alone(SingleRank):
    """A rank whose others never came: it can load, for that needs no other rank."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size = rank, size


@pytest.fixture
def folder(model_folder: Any, tmp_path: Path) -> Path:
    """A copy of the random Llama that a test may damage."""
    copied = tmp_path / "model"
    shutil.copytree(model_folder("llama"), copied)
    return copied


def load(folder: Path) -> Decoder:
    decoder = Decoder(read_model_config(folder), dtype=torch.float32, max_positions=64)
    decoder.load(folder)
    return decoder


def tensors_of(folder: Path) -> list[torch.Tensor]:
    decoder = Decoder(read_model_config(folder), dtype=torch.float32, max_positions=64)
    load_weights(folder, decoder.parameters())
    return [parameter.tensor for parameter in decoder.parameters()]


def edit(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


DAMAGE: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "missing": (
        lambda t: [t.pop(f"model.layers.1.{n}.weight") for n in ("mlp.up_proj", "self_attn.q_proj")],
        r"is missing 2 tensors: model\.layers\.1\.mlp\.up_proj\.weight, model\.layers\.1\.self_attn",
    ),
    "unexpected": (
        lambda t: t.update({f"model.layers.0.extra.{n}": torch.ones(1) for n in range(5)}),
        r"has unexpected 5 tensors: model\.layers\.0\.extra\.0, .*…",
    ),
    "a bias nobody announced": (
        lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}), "unexpected 1 tensors",
    ),
    "another layer": (lambda t: t.update({"model.layers.2.input_layernorm.weight": torch.ones(64)}), "unexpected"),
    "a wrong shape": (
        lambda t: t.update({"model.norm.weight": torch.ones(63)}),
        r"model\.norm\.weight in .* has shape \[63\]: config.json asks for \[64\]",
    ),
    "a transposed matrix": (
        lambda t: t.update({"model.layers.0.mlp.down_proj.weight": torch.ones(192, 64)}), r"asks for \[64, 192\]",
    ),
    "whole numbers": (
        lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}), "nothing in config.json says",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted(DAMAGE))
def test_tensors_that_do_not_fit_are_named(kind: str, folder: Path) -> None:
    change, complaint = DAMAGE[kind]
    edit(folder, change)
    with pytest.raises(ModelError, match=complaint):
        load(folder)


def test_old_rotary_buffers_and_the_copy_of_a_tied_head_are_let_pass(folder: Path) -> None:
    edit(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    load(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    tied = load(folder)
    assert tied.head is tied.embedding


def cut_tail(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def cut_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def scribble(path: Path) -> None:
    path.write_bytes(b"\xff" * 4096)


@pytest.mark.parametrize("damage", [cut_tail, cut_header, empty, scribble])
def test_a_damaged_file_is_named(damage: Callable[[Path], None], folder: Path) -> None:
    damage(folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged") as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def test_shards_load_like_one_file(folder: Path) -> None:
    whole = tensors_of(folder)
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    shards = {"model-00001.safetensors": names[::2], "model-00002.safetensors": names[1::2]}
    for shard, keys in shards.items():
        save_file({key: tensors[key] for key in keys}, folder / shard)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"2 safetensors files and no model\.safetensors\.index"):
        load(folder)
    index = {"weight_map": {key: shard for shard, keys in shards.items() for key in keys}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for one, other in zip(whole, tensors_of(folder), strict=True):
        assert torch.equal(one, other)
    (folder / "model-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00002\.safetensors does not exist"):
        load(folder)


@pytest.mark.parametrize(
    ("index", "complaint"),
    [
        ("{", "cannot be read"),
        pytest.param("[" * 100_000 + "]" * 100_000, "cannot be read", id="deep"),
        ("{}", "cannot be read"),
        ('{"weight_map": {}}', "names no files"),
        ('{"weight_map": {"a": "../other/model.safetensors"}}', "outside its folder"),
        ('{"weight_map": {"a": "pytorch_model.bin"}}', "only safetensors are loaded"),
    ],
)
def test_an_index_that_cannot_be_used_is_named(index: str, complaint: str, folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match=complaint):
        load(folder)


def test_pickled_weights_are_refused_by_name(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no safetensors weights\. Give a folder"):
        load(folder)
    (folder / "pytorch_model.bin").write_bytes(b"not opened")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is pickled"):
        load(folder)


def test_a_decoder_without_weights_says_so(folder: Path) -> None:
    decoder = Decoder(read_model_config(folder), dtype=torch.float32, max_positions=64)
    assert all(parameter.tensor.is_meta for parameter in decoder.parameters())
    with pytest.raises(ModelError, match="no weights"):
        decoder.forward(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), None, lambda *_: _[1])


def test_matrices_are_held_once(folder: Path) -> None:
    decoder = load(folder)
    held = [parameter for parameter in decoder.parameters() if not parameter.tensor.is_meta]
    assert all(parameter is decoder.embedding or parameter.columns is None for parameter in held)


def test_two_ranks_hold_the_halves_of_every_split_matrix(folder: Path) -> None:
    tensors, config = load_file(folder / "model.safetensors"), read_model_config(folder)
    ranks = []
    for rank in range(2):
        decoder = Decoder(config, dtype=torch.float32, max_positions=64, group=Alone(rank, 2))
        load_weights(folder, decoder.parameters(), tp_rank=rank, tp_size=2)
        ranks.append(decoder.layers[1])
    name = "model.layers.1"
    q, k, v = (tensors[f"{name}.self_attn.{n}_proj.weight"] for n in "qkv")
    gate, up = (tensors[f"{name}.mlp.{n}_proj.weight"] for n in ("gate", "up"))
    for rank, layer in enumerate(ranks):
        assert torch.equal(layer.qkv.tensor, torch.cat([part.chunk(2)[rank] for part in (q, k, v)]))
        assert isinstance(layer.feed_forward, MlpParameters)
        assert torch.equal(layer.feed_forward.gate_up.tensor, torch.cat([part.chunk(2)[rank] for part in (gate, up)]))
        assert torch.equal(layer.o.tensor, tensors[f"{name}.self_attn.o_proj.weight"].chunk(2, 1)[rank])
        assert torch.equal(layer.feed_forward.down.tensor, tensors[f"{name}.mlp.down_proj.weight"].chunk(2, 1)[rank])
        assert torch.equal(layer.input_norm.tensor, tensors[f"{name}.input_layernorm.weight"])


def test_ranks_beyond_the_kv_heads_share_them(folder: Path) -> None:
    """2 KV heads on 4 ranks: ranks 0 and 1 hold head 0, ranks 2 and 3 head 1."""
    k = load_file(folder / "model.safetensors")["model.layers.0.self_attn.k_proj.weight"]
    part = (TensorPart(key="model.layers.0.self_attn.k_proj.weight", rows=32, replicas=2),)
    for rank in range(4):
        parameter = Parameter.on_meta(part, columns=64, split=TensorSplit.ROWS, dtype=torch.float32, tp_size=4)
        others = [key for key in load_file(folder / "model.safetensors") if key != part[0].key]
        load_weights(folder, [parameter], tp_rank=rank, tp_size=4, ignored_keys=others)
        assert torch.equal(parameter.tensor, k.chunk(2)[rank // 2])


def test_uneven_splits_are_refused() -> None:
    with pytest.raises(ValueError, match="63 cannot be split over 2 ranks"):
        Parameter.on_meta(
            (TensorPart(key="a", rows=63),), columns=8, split=TensorSplit.ROWS, dtype=torch.float32, tp_size=2
        )


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"num_blocks": 8, "kv_bytes": 1 << 20}, "exactly one of kv_bytes and num_blocks"),
        ({}, "exactly one of kv_bytes and num_blocks"),
        ({"num_blocks": 8, "dtype": "int8"}, "dtype int8 is unknown"),
        ({"num_blocks": 8, "kv_dtype": "int8"}, "KV dtype int8 is unknown. Use auto, float32, bfloat16, float16"),
        ({"num_blocks": 8, "device": "abacus"}, "device abacus is unknown"),
        ({"num_blocks": 8, "device": "meta"}, "device meta is not supported"),
        ({"num_blocks": 8, "max_model_len": 4096}, "has 2048 positions"),
        ({"num_blocks": 8, "max_model_len": -1}, "max_model_len is -1"),
        ({"num_blocks": 8, "block_tokens": 0}, "block_tokens is 0"),
        ({"num_blocks": 8, "layer_group": 0}, "layer_group is 0"),
        ({"num_blocks": 8, "max_model_len": 129}, "too small for one sequence of 129 tokens: it holds 128"),
        ({"kv_bytes": 1000, "max_model_len": 64}, "Give --kv-memory"),
    ],
)
def test_settings_that_cannot_work_are_named(options: dict[str, Any], complaint: str, folder: Path) -> None:
    with pytest.raises(StartupError, match=complaint):
        ModelRunner(model_dir=folder, **options)


def test_an_automatic_pool_is_a_share_of_what_is_left_beside_the_rest(folder: Path) -> None:
    def runner(automatic: AutomaticKV, sequences: int = 64) -> ModelRunner:
        bounds = StepBounds(sequences=sequences)
        return ModelRunner(model_dir=folder, max_model_len=64, automatic=automatic, bounds=bounds)

    most = runner(AutomaticKV())
    assert most.num_blocks == (64 * 64 // 16,), "as many full contexts as may run at once"
    assert runner(AutomaticKV(), sequences=3).num_blocks == (3 * 64 // 16,)
    beside, block = most.memory.total - most.memory.kv, most.layout.groups[0].block_bytes(1)
    for left in (100 * block, 160 * block):
        assert runner(AutomaticKV(memory_bytes=beside + left)).num_blocks == (left // block // 2,)
    assert runner(AutomaticKV(memory_bytes=beside + 5 * block)).num_blocks == (64 // 16,), "one context, if it fits"
    with pytest.raises(StartupError, match=r"no KV for one sequence of 64 tokens.*Give --max-model-len 48 or less"):
        runner(AutomaticKV(memory_bytes=beside + 3 * block))
