"""Layers of experts: the grouped way against a loop over tokens, checkpoints in both spellings, every variant."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from tandem.core.errors import ModelError
from tandem.engine.experts_config import ExpertsConfig
from tandem.engine.model_config import read_model_config
from tandem.engine.models.decoder import Decoder
from tandem.engine.models.experts import ExpertParameters, Experts, pack_experts
from tandem.engine.models.routing import Routing, SoftmaxRouter
from tandem.engine.parallel import SingleRank
from tandem.engine.runner import ModelRunner
from tandem.engine.weights import load_weights
from tandem.kernels.silu_mul import silu_mul
from tests.unit.engine.model.driver import Driver, random_tokens

HIDDEN, FEATURES, COUNT = 24, 16, 6
SHAPE: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


class Alone(SingleRank):
    """A rank whose others never came: it can load, for that needs no other rank."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size = rank, size


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def plain_linear(weight: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: functional.linear(x, weight)


@pytest.mark.parametrize("tokens", [1, 2, 33])
@pytest.mark.parametrize("per_token", [1, 3, COUNT])
def test_tokens_grouped_by_expert_are_the_loop_over_tokens(tokens: int, per_token: int) -> None:
    config = ExpertsConfig(count=COUNT, per_token=per_token, intermediate=FEATURES, layers=frozenset({0}))
    scores, gate_up, down = randn(COUNT, HIDDEN, seed=1), randn(COUNT, 2 * FEATURES, HIDDEN, seed=2), randn(
        COUNT, HIDDEN, FEATURES, seed=3
    )  # fmt: skip
    x = randn(tokens, HIDDEN, seed=4)
    kept, called = x.clone(), [0] * COUNT

    def watched(number: int) -> Callable[[Tensor], Tensor]:
        def call(rows: Tensor) -> Tensor:
            called[number] += 1
            return functional.linear(rows, gate_up[number])

        return call

    packed = pack_experts(down.flatten(0, 1), COUNT, plain_linear)
    products = list(zip(map(watched, range(COUNT)), packed, strict=True))
    found = Experts(SoftmaxRouter(config, plain_linear(scores)), products, silu_mul)(x)
    chosen: set[int] = set()
    for token, row in enumerate(x):
        best = torch.softmax(scores @ row, -1).topk(per_token)
        weights = best.values / best.values.sum()
        expected = torch.zeros(HIDDEN)
        for weight, number in zip(weights, best.indices.tolist(), strict=True):
            gate, up = (gate_up[number] @ row).chunk(2)
            expected += weight * (down[number] @ (functional.silu(gate) * up))
            chosen.add(number)
        torch.testing.assert_close(found[token], expected, atol=1e-4, rtol=1e-5)
    assert called == [int(number in chosen) for number in range(COUNT)], "each expert once a step, if anybody needs it"
    assert torch.equal(x, kept)


def test_weights_that_are_not_normed_stay_probabilities() -> None:
    config = ExpertsConfig(count=4, per_token=2, intermediate=8, layers=frozenset({0}), is_normed=False)
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0], [3.0, 0.0, 0.0, 4.0]])
    routing = SoftmaxRouter(config, lambda x: x)(logits)
    assert routing.experts.tolist() == [[1, 2], [3, 0]]
    torch.testing.assert_close(routing.weights, torch.softmax(logits, -1).gather(1, routing.experts))


def test_answers_of_bfloat16_are_added_in_fp32() -> None:
    """256 + 1 is 256 in bfloat16, so that sums of its own would lose every second answer."""
    routing = Routing(torch.tensor([[0, 1, 2]]), torch.ones(1, 3))
    answers = [torch.tensor([[value]], dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]
    products = [(lambda x: x, lambda x, answer=answer: answer) for answer in answers]
    found = Experts(lambda x: routing, products, lambda x: x)(torch.ones((1, 1), dtype=torch.bfloat16))
    assert (found.dtype, found.item()) == (torch.bfloat16, 258.0)


def transformers_model(name: str, **changes: Any) -> Any:
    import transformers

    torch.manual_seed(5)
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**SHAPE | changes))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.normal_(0.0, 0.4 if ".gate." in key else 0.1)
    return model


MIXTRAL: dict[str, Any] = {"num_local_experts": 4}
QWEN: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", MIXTRAL),
    "mixtral, window and tied": ("Mixtral", MIXTRAL | {"sliding_window": 20, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Moe", QWEN | {"norm_topk_prob": True}),
    "qwen3, probabilities and biases": ("Qwen3Moe", QWEN | {"norm_topk_prob": False, "attention_bias": True}),
    "qwen3, dense layers": ("Qwen3Moe", QWEN | {"mlp_only_layers": [1]}),
    "qwen3, every second": ("Qwen3Moe", QWEN | {"decoder_sparse_step": 2}),
    "qwen3, window": ("Qwen3Moe", QWEN | {"use_sliding_window": True, "sliding_window": 20}),
}


@pytest.mark.parametrize("variant", sorted(VARIANTS))
@pytest.mark.parametrize("is_stacked", [False, True], ids=["each on its own", "stacked"])
def test_what_transformers_saves_loads_and_agrees(variant: str, is_stacked: bool, tmp_path: Path) -> None:
    name, changes = VARIANTS[variant]
    model = transformers_model(name, **changes)
    model.save_pretrained(tmp_path, save_original_format=not is_stacked)
    keys = load_file(tmp_path / "model.safetensors")
    assert any(key.endswith("mlp.experts.gate_up_proj") for key in keys) == is_stacked
    runner, tokens = ModelRunner(model_dir=tmp_path, num_blocks=20, max_model_len=128), random_tokens(70, 128)
    with torch.no_grad():
        want = model.eval()(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(Driver(runner).chunked("a", tokens, 16), want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_ranks_hold_a_slice_of_every_expert_in_either_spelling(name: str, model_folder: Any, tmp_path: Path) -> None:
    folder = model_folder(name)
    tensors, config = load_file(folder / "model.safetensors"), read_model_config(folder)
    assert config.experts is not None
    names = config.experts.names
    block = f"model.layers.1.{names.block}"
    gates, ups, downs = (
        [tensors[f"{block}.experts.{n}.{each}.weight"] for n in range(config.experts.count)]
        for each in (names.gate, names.up, names.down)
    )
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(stacked(tensors, config.layers, config.experts), tmp_path / "model.safetensors")
    for source in (folder, tmp_path):
        for rank in range(2):
            decoder = Decoder(config, dtype=torch.float32, max_positions=64, group=Alone(rank, 2))
            load_weights(source, decoder.parameters(), tp_rank=rank, tp_size=2)
            found = decoder.layers[1].feed_forward
            assert isinstance(found, ExpertParameters)
            slices = [part.chunk(2)[rank] for pair in zip(gates, ups, strict=True) for part in pair]
            assert torch.equal(found.gate_up.tensor, torch.cat(slices))
            assert torch.equal(found.down.tensor, torch.cat([down.chunk(2, 1)[rank] for down in downs]))
            assert torch.equal(found.router.tensor, tensors[f"{block}.gate.weight"])


def stacked(tensors: dict[str, Tensor], layers: int, experts: ExpertsConfig) -> dict[str, Tensor]:
    """A checkpoint as transformers has it in memory."""
    names = experts.names
    found = {key: tensor for key, tensor in tensors.items() if not re.search(r"\.experts\.|\.gate\.", key)}
    for layer in (f"model.layers.{index}" for index in range(layers)):
        each = [f"{layer}.{names.block}.experts.{number}" for number in range(experts.count)]
        pairs = [torch.cat([tensors[f"{one}.{name}.weight"] for name in (names.gate, names.up)]) for one in each]
        found[f"{layer}.mlp.experts.gate_up_proj"] = torch.stack(pairs)
        found[f"{layer}.mlp.experts.down_proj"] = torch.stack([tensors[f"{one}.{names.down}.weight"] for one in each])
        found[f"{layer}.mlp.gate.weight"] = tensors[f"{layer}.{names.block}.gate.weight"]
    return found


DAMAGE: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "missing": (
        lambda t: t.pop("model.layers.1.block_sparse_moe.experts.3.w2.weight"),
        r"is missing 1 tensors: model\.layers\.1\.block_sparse_moe\.experts\.3\.w2\.weight",
    ),
    "one too many": (
        lambda t: t.update({"model.layers.0.block_sparse_moe.experts.8.w1.weight": torch.ones(192, 64)}),
        r"unexpected 1 tensors: model\.layers\.0\.block_sparse_moe\.experts\.8",
    ),
    "a wrong shape": (
        lambda t: t.update({"model.layers.0.block_sparse_moe.experts.2.w3.weight": torch.ones(64, 64)}),
        r"experts\.2\.w3\.weight in .* has shape \[64, 64\]: config.json asks for \[192, 64\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted(DAMAGE))
def test_experts_that_do_not_fit_are_named(kind: str, model_folder: Any, tmp_path: Path) -> None:
    change, complaint = DAMAGE[kind]
    tensors = load_file(model_folder("mixtral") / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    config = read_model_config(model_folder("mixtral"))
    with pytest.raises(ModelError, match=complaint):
        load_weights(tmp_path, Decoder(config, dtype=torch.float32, max_positions=64).parameters())


def test_stacked_experts_of_another_shape_are_named(model_folder: Any, tmp_path: Path) -> None:
    config = read_model_config(model_folder("qwen3_moe"))
    assert config.experts is not None
    tensors = stacked(load_file(model_folder("qwen3_moe") / "model.safetensors"), config.layers, config.experts)
    tensors["model.layers.0.mlp.experts.gate_up_proj"] = torch.ones(8, 192, 64)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"gate_up_proj in .* has shape \[8, 192, 64\]: .* asks for \[8, 384, 64\]"):
        load_weights(tmp_path, Decoder(config, dtype=torch.float32, max_positions=64).parameters())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_experts_are_held_once_and_counted(device: str, model_folder: Any) -> None:
    config = read_model_config(model_folder("mixtral"))
    decoder = Decoder(config, dtype=torch.float32, max_positions=64)
    size = sum(tensor.nbytes for tensor in load_file(model_folder("mixtral") / "model.safetensors").values())
    assert decoder.weight_bytes(torch.device(device)) == size
    decoder.load(model_folder("mixtral"))
    held = [parameter for parameter in decoder.parameters() if not parameter.tensor.is_meta]
    assert all(parameter is decoder.embedding or parameter.columns is None for parameter in held)


def config_of(folder: Path, raw: dict[str, Any], changes: dict[str, Any]) -> Any:
    (folder / "config.json").write_text(json.dumps(raw | changes))
    return read_model_config(folder)


QWEN_RAW: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 6, "num_experts": 16, "num_experts_per_tok": 4,
    "moe_intermediate_size": 24,
}  # fmt: skip
MIXTRAL_RAW: dict[str, Any] = {"architectures": ["MixtralForCausalLM"]}


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, {0, 1, 2, 3, 4, 5}),
        ({"mlp_only_layers": [0, 5]}, {1, 2, 3, 4}),
        ({"decoder_sparse_step": 2}, {1, 3, 5}),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [2]}, {5}),
        ({"mlp_only_layers": [0, 1, 2, 3, 4, 5]}, set()),
    ],
)
def test_which_layers_have_experts(
    changes: dict[str, Any], layers: set[int], raw_config: dict[str, Any], tmp_path: Path
) -> None:
    config = config_of(tmp_path, raw_config | QWEN_RAW, changes)
    assert config.experts == ExpertsConfig(
        count=16, per_token=4, intermediate=24, layers=frozenset(layers), is_normed=False
    )
    assert config.dense_layers == 6 - len(layers)


def test_what_configs_leave_out_is_what_transformers_takes(raw_config: dict[str, Any], tmp_path: Path) -> None:
    mixtral = config_of(tmp_path, raw_config | MIXTRAL_RAW, {}).experts
    assert (mixtral.count, mixtral.per_token, mixtral.intermediate, mixtral.is_normed) == (8, 2, 48, True)
    assert len(mixtral.layers) == raw_config["num_hidden_layers"]
    qwen = config_of(tmp_path, raw_config | {"architectures": ["Qwen3MoeForCausalLM"]}, {}).experts
    assert (qwen.count, qwen.per_token, qwen.intermediate, qwen.is_normed) == (128, 8, 768, False)
    other = config_of(tmp_path, raw_config | QWEN_RAW, {"num_experts": None, "num_local_experts": 16}).experts
    assert other.count == 16, "transformers 5 spells it so"


@pytest.mark.parametrize(
    ("raw", "changes", "complaint"),
    [
        (MIXTRAL_RAW, {"num_experts_per_tok": 9}, "num_experts_per_tok is 9: a layer has 8 experts"),
        (MIXTRAL_RAW, {"norm_topk_prob": False}, "norm_topk_prob False is not supported"),
        (MIXTRAL_RAW, {"n_shared_experts": 1}, "n_shared_experts 1 is not supported"),
        (MIXTRAL_RAW, {"scoring_func": "sigmoid"}, "scoring_func sigmoid is not supported"),
        (MIXTRAL_RAW, {"num_local_experts": 2.5}, "num_local_experts is 2.5: it must be a whole number"),
        (QWEN_RAW, {"mlp_only_layers": [6]}, r"mlp_only_layers is \[6\]: it must list layers from 0 to 5"),
        (QWEN_RAW, {"mlp_only_layers": 1}, "mlp_only_layers is 1"),
        (QWEN_RAW, {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        (QWEN_RAW, {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size 64 is not supported"),
        (QWEN_RAW, {"routed_scaling_factor": 2.5}, "routed_scaling_factor 2.5 is not supported"),
        ({}, {"mlp_only_layers": [1]}, r"mlp_only_layers \[1\] is not supported: LlamaForCausalLM"),
    ],
)
def test_what_cannot_be_served_is_named(
    raw: dict[str, Any], changes: dict[str, Any], complaint: str, raw_config: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=complaint):
        config_of(tmp_path, raw_config | raw, changes)
