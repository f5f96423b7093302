"""gpt-oss: sinks, clamped experts with biases and packed checkpoints, against transformers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tandem.core.errors import ModelError
from tandem.engine.experts_config import BiasedExpertsConfig
from tandem.engine.model_config import read_model_config
from tandem.engine.model_work import model_work
from tandem.engine.models.decoder import Decoder
from tandem.engine.parallel import SingleRank
from tandem.engine.pool_plan import kv_layout
from tandem.engine.runner import ModelRunner
from tandem.engine.weights import load_weights
from tandem.kernels.dtypes import product_dtype
from tests.unit.engine.model.driver import Driver, compute_reference, random_tokens, tool

TOLERANCE = 1e-4
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


def packed(source: Path, folder: Path, change: Callable[[dict[str, Tensor]], object] = lambda _: None) -> Path:
    """The model in `source` with random MXFP4 experts, its other tensors as they are."""
    tensors, generator = load_file(source / "model.safetensors"), torch.Generator().manual_seed(5)
    for key in [key for key in tensors if key.endswith(("gate_up_proj", "down_proj"))]:
        count, inputs, outputs = tensors.pop(key).shape
        shape = (count, outputs, inputs // 32)
        tensors[f"{key}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        tensors[f"{key}_scales"] = torch.randint(120, 125, shape, generator=generator, dtype=torch.uint8)
    change(tensors)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": MXFP4}))
    return folder


def logits_of_transformers(folder: Path, tokens: list[int], dtype: torch.dtype) -> Tensor:
    from transformers import AutoModelForCausalLM
    from transformers.utils.quantization_config import Mxfp4Config

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", quantization_config=Mxfp4Config(dequantize=True)
    )
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([tokens])).logits[0]
    return logits.float()


def test_the_config_as_openai_and_as_transformers_write_it(model_folder: Any, write_config: Any) -> None:
    old = json.loads((model_folder("gpt_oss") / "config.json").read_text())
    config = read_model_config(model_folder("gpt_oss"))
    assert config.experts == BiasedExpertsConfig(
        count=8, per_token=2, intermediate=192, layers=frozenset({0, 1}), routing="chosen_softmax", alpha=1.702,
        limit=0.5,
    )  # fmt: skip
    assert (config.window, config.windowed_layers, config.rope.kind) == (40, frozenset({0}), "yarn")
    assert (config.has_qkv_bias, config.has_o_bias, config.has_sinks) == (True, True, True)
    new = {key: value for key, value in old.items() if key not in ("rope_theta", "rope_scaling", "torch_dtype")}
    new |= {"dtype": "float32", "rope_parameters": {**old["rope_scaling"], "rope_theta": 150000.0}}
    assert read_model_config(write_config(new)) == config


def test_what_config_json_leaves_out_is_as_in_transformers(raw_config: dict[str, Any], write_config: Any) -> None:
    from transformers import GptOssConfig

    plain = GptOssConfig()
    for name in ("rope_theta", "rms_norm_eps"):
        del raw_config[name]
    config = read_model_config(write_config(raw_config | {"architectures": ["GptOssForCausalLM"]}))
    experts = config.experts
    assert isinstance(experts, BiasedExpertsConfig)
    assert (experts.count, experts.per_token) == (plain.num_local_experts, plain.num_experts_per_tok)
    assert (experts.alpha, experts.limit) == (plain.swiglu_alpha, plain.swiglu_limit)
    assert (config.head_dim, config.window, config.norm_eps) == (plain.head_dim, plain.sliding_window, 1e-5)
    rope: Any = plain.rope_parameters
    assert (config.rope.theta, config.rope.factor) == (rope["rope_theta"], rope["factor"])
    assert (config.rope.kind, config.rope.is_truncated) == ("yarn", False)
    assert config.rope.original_max_positions == rope["original_max_position_embeddings"]


@pytest.mark.parametrize(
    "changes",
    [
        {"swiglu_limit": 7.0}, {"swiglu_alpha": 1.0}, {"num_experts_per_tok": 3}, {"sliding_window": 100},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 64}},
    ],
    ids=lambda changes: next(iter(changes)),
)  # fmt: skip
def test_each_field_counts(changes: dict[str, Any], model_folder: Any, reference: Any, tmp_path: Path) -> None:
    """The changed model has other logits, and the engine follows."""
    config = json.loads((model_folder("gpt_oss") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    (tmp_path / "model.safetensors").write_bytes((model_folder("gpt_oss") / "model.safetensors").read_bytes())
    tokens = reference("gpt_oss").tokens[:120]
    want = compute_reference(tmp_path, tokens).logits
    assert (want - reference("gpt_oss").logits[:120]).abs().max() > 100 * TOLERANCE
    runner = ModelRunner(model_dir=tmp_path, num_blocks=20, max_model_len=128)
    close(Driver(runner).chunked("a", tokens, 16), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_transformers_saves_loads_and_agrees(dtype: torch.dtype, tmp_path: Path) -> None:
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(5)
    model: Any = GptOssForCausalLM(GptOssConfig(
        vocab_size=128, hidden_size=32, intermediate_size=44, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=20,
        bos_token_id=0, eos_token_id=1, pad_token_id=0,
    ))  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2)
    model.to(dtype).save_pretrained(tmp_path, max_shard_size="20KB")
    runner = ModelRunner(model_dir=tmp_path, num_blocks=20, dtype="float32", max_model_len=128)
    assert runner.config.dtype == str(dtype).removeprefix("torch.")
    tokens = random_tokens(70, 128)
    close(Driver(runner).chunked("a", tokens, 16), compute_reference(tmp_path, tokens).logits)


def test_packed_experts_are_those_of_transformers(model_folder: Any, tmp_path: Path) -> None:
    folder, tokens = packed(model_folder("gpt_oss"), tmp_path), random_tokens(120, 512)
    runner = ModelRunner(model_dir=folder, num_blocks=20, max_model_len=128)
    close(Driver(runner).chunked("a", tokens, 50), logits_of_transformers(folder, tokens, torch.float32))


@pytest.mark.parametrize("is_packed", [False, True])
def test_bf16_stays_close_to_transformers_in_bf16(is_packed: bool, model_folder: Any, tmp_path: Path) -> None:
    """The first token that is another one is among the best five of transformers: in float32 where the engine widens
    products, which is nearer to that."""
    folder, tokens = model_folder("gpt_oss"), random_tokens(100, 512)
    if is_packed:
        folder = packed(folder, tmp_path)
        want = logits_of_transformers(folder, tokens, torch.bfloat16)
    else:
        want = compute_reference(folder, tokens, torch.bfloat16).logits
    runner = ModelRunner(model_dir=folder, dtype="bfloat16", num_blocks=20, max_model_len=128)
    got = Driver(runner).chunked("a", tokens, 7)
    is_widened = product_dtype(torch.bfloat16, torch.device("cpu")) is torch.float32
    near = logits_of_transformers(folder, tokens, torch.float32) if is_widened else want
    assert (near.topk(5, -1).indices == got.argmax(-1, keepdim=True)).any(-1).all()
    assert (got.log_softmax(-1) - want.log_softmax(-1)).abs().mean() < 0.05


class Alone(SingleRank):
    """A rank whose others never came: it can load, for that needs no other rank."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size = rank, size


def experts_of_rank(folder: Path, rank: int, size: int) -> list[Tensor]:
    """Gate and up, their biases, down and its bias of the last layer, by expert; and the layer's sinks."""
    group = Alone(rank, size)
    decoder = Decoder(read_model_config(folder), dtype=torch.float32, max_positions=64, group=group)
    load_weights(folder, decoder.parameters(), tp_rank=rank, tp_size=size)
    layer = decoder.layers[-1]
    of: Any = layer.feed_forward
    assert layer.sinks is not None
    tensors = (of.gate_up.tensor, of.gate_up_bias.tensor, of.down.tensor, of.down_bias.tensor)
    return [*(tensor.view(8, -1, *tensor.shape[1:]) for tensor in tensors), layer.sinks.tensor]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("is_packed", [False, True])
def test_ranks_have_slices_of_every_expert(is_packed: bool, size: int, tmp_path: Path) -> None:
    """Of 96 features, a quarter ends within a group of packed numbers."""
    model = tool.RandomModel(family="gpt_oss", heads=4, layers=1, intermediate=96)
    tool.make_random_model(model, tmp_path / "plain")
    folder = packed(tmp_path / "plain", tmp_path / "packed") if is_packed else tmp_path / "plain"
    whole, ranks = experts_of_rank(folder, 0, 1), [experts_of_rank(folder, rank, size) for rank in range(size)]
    for place in (0, 1):  # gates, then ups
        halves = [each[place].chunk(2, 1) for each in ranks]
        together = torch.cat([half[0] for half in halves] + [half[1] for half in halves], 1)
        assert torch.equal(together, whole[place])
    assert torch.equal(torch.cat([each[2] for each in ranks], 2), whole[2])
    assert all(torch.equal(each[3], whole[3]) for each in ranks)
    assert torch.equal(torch.cat([each[4] for each in ranks]), whole[4])


def test_flops_and_bytes_are_of_its_matrices(model_folder: Any) -> None:
    config = read_model_config(model_folder("gpt_oss"))
    work = model_work(config, dtype="float32", layout=kv_layout(config, dtype="float32", block_tokens=16))
    decoder = Decoder(config, dtype=torch.float32, max_positions=64)
    tensors = [one.tensor for one in decoder.parameters() if one is not decoder.embedding]
    assert work.experts is not None
    plain, routed = work.token_weight_bytes + work.row_weight_bytes, 2 * 8 * work.experts.expert_bytes
    assert plain + routed == sum(tensor.nbytes for tensor in tensors if tensor.ndim == 2)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, r"quantized weights \(awq\) are not supported"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
            r"quantized weights \(fp8\) are not supported: .*plain or as mxfp4",
        ),
        ({"quantization_config": MXFP4 | {"speed": 3}}, "quantization_config.speed is not supported"),
        ({"quantization_config": MXFP4, "intermediate_size": 100}, "intermediate_size is 100: .*multiple of 32"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9"),
        ({"swiglu_limit": -1}, "swiglu_limit is -1"),
        ({"n_shared_experts": 1}, "n_shared_experts 1 is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act gelu is not supported"),
    ],
)
def test_what_is_not_computed_is_named(
    changes: dict[str, Any], complaint: str, model_folder: Any, write_config: Any
) -> None:
    config = json.loads((model_folder("gpt_oss") / "config.json").read_text())
    with pytest.raises(ModelError, match=complaint):
        read_model_config(write_config(config | changes))


EXPERTS = "model.layers.1.mlp.experts"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda t: t.pop(f"{EXPERTS}.down_proj_scales"), rf"is missing 1 tensors: {EXPERTS}.down_proj_scales"),
        (lambda t: t.update({f"{EXPERTS}.down_proj": torch.ones(1)}), rf"unexpected 1 tensors: {EXPERTS}.down_proj\."),
        (
            lambda t: t.update({f"{EXPERTS}.down_proj_blocks": torch.zeros(8, 64, 5, 16, dtype=torch.uint8)}),
            r"down_proj_blocks in .* has shape \[8, 64, 5, 16\]: config.json asks for \[8, 64, 6, 16\]",
        ),
        (
            lambda t: t.update({f"{EXPERTS}.down_proj_scales": torch.zeros(8, 64, 6)}),
            "down_proj_blocks in .* cannot be unpacked: blocks and scales must be uint8",
        ),
    ],
)
def test_damaged_packed_checkpoints_are_named(change: Any, complaint: str, model_folder: Any, tmp_path: Path) -> None:
    folder = packed(model_folder("gpt_oss"), tmp_path, change)
    with pytest.raises(ModelError, match=complaint):
        ModelRunner(model_dir=folder, num_blocks=20, max_model_len=128)


def test_a_plain_checkpoint_under_a_packed_config_is_named(
    model_folder: Any, write_config: Any, tmp_path: Path
) -> None:
    config = json.loads((model_folder("gpt_oss") / "config.json").read_text())
    folder = write_config(config | {"quantization_config": MXFP4})
    (folder / "model.safetensors").write_bytes((model_folder("gpt_oss") / "model.safetensors").read_bytes())
    with pytest.raises(ModelError, match=r"is missing 8 tensors: .*down_proj_blocks"):
        ModelRunner(model_dir=folder, num_blocks=20, max_model_len=128)
