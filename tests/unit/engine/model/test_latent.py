"""Multi-head latent attention against transformers: logits, cached rows and greedy tokens of tiny DeepSeek models."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.core.errors import ModelError
from tandem.engine.checkpoint_formats.fp8 import Fp8
from tandem.engine.model_config import read_model_config
from tandem.engine.pool_plan import kv_layout
from tandem.engine.runner import ModelRunner
from tests.unit.engine.model.driver import Driver, compute_reference, random_tokens

TOLERANCE = 1e-4
SHAPE: dict[str, Any] = {
    "vocab_size": 160, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 12, "qk_rope_head_dim": 16, "v_head_dim": 20,
    "max_position_embeddings": 256, "first_k_dense_replace": 2, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
    "n_group": 1, "topk_group": 1,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 20000.0, "factor": 8.0, "original_max_position_embeddings": 32,
    "beta_fast": 32, "beta_slow": 1, "mscale": 0.7, "mscale_all_dim": 1.2,
}  # fmt: skip
EXPERTS = {
    "q_lora_rank": None, "first_k_dense_replace": 1, "n_routed_experts": 16, "num_experts_per_tok": 3,
    "moe_intermediate_size": 32, "n_shared_experts": 2,
}  # fmt: skip
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "v2": ("V2", {"q_lora_rank": None}),
    "v2, queries of a latent": ("V2", {"q_lora_rank": 24, "rope_parameters": YARN}),
    "v2, biases": ("V2", {"q_lora_rank": None, "attention_bias": True, "mlp_bias": True}),
    "v3": ("V3", {"q_lora_rank": 24, "rope_parameters": YARN}),
    "v3, biases": ("V3", {"q_lora_rank": 24, "attention_bias": True}),
    "v2, greedy": ("V2", EXPERTS | {"topk_method": "greedy", "routed_scaling_factor": 1.7}),
    "v2, groups": ("V2", EXPERTS | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}),
    "v3, groups": ("V3", EXPERTS | {"n_group": 4, "topk_group": 2, "q_lora_rank": 24}),
    "v3, no norm": ("V3", EXPERTS | {"norm_topk_prob": False}),
    "v3, halves": ("V3", {"q_lora_rank": None, "rope_interleave": False}),
}  # fmt: skip


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A variant as transformers saves it, made once."""
    import transformers

    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            version, changes = VARIANTS[name]
            torch.manual_seed(7)
            config = getattr(transformers, f"Deepseek{version}Config")(**(SHAPE | changes))
            model = getattr(transformers, f"Deepseek{version}ForCausalLM")(config)
            with torch.no_grad():
                for key, parameter in model.named_parameters():
                    parameter.normal_(1.0 if "norm" in key else 0.0, 0.6 if "gate.weight" in key else 0.15)
                for key, buffer in model.named_buffers():
                    if "correction" in key:
                        buffer.normal_(0.0, 0.3)
            made[name] = tmp_path_factory.mktemp("latent")
            model.save_pretrained(made[name])
        return made[name]

    return folder


@pytest.fixture(scope="session")
def expected(saved: Any) -> Callable[[str], Any]:
    """Return transformers' results for 150 tokens."""
    made: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in made:
            made[name] = compute_reference(saved(name), random_tokens(150, SHAPE["vocab_size"]))
        return made[name]

    return get


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=0)


@pytest.mark.drawn(15)
@pytest.mark.parametrize("chunk", [1, 16, 150])
@pytest.mark.parametrize("name", VARIANTS)
def test_chunks_have_the_logits_and_the_rows_of_transformers(name: str, chunk: int, saved: Any, expected: Any) -> None:
    want = expected(name)
    runner = ModelRunner(model_dir=saved(name), dtype="float32", num_blocks=20)
    driver = Driver(runner)
    close(driver.chunked("a", want.tokens, chunk), want.logits)
    assert runner.pools.tensors[0].shape == (20, 2, 1, 1, 16, 48)
    for layer, (latent, turned) in enumerate(want.kv):
        rows, same = driver.stored_kv("a", layer)
        assert rows.data_ptr() == same.data_ptr() or torch.equal(rows, same)
        close(rows[0, :, :32], latent[0])
        if VARIANTS[name][0] == "V2":  # transformers leaves pairs side by side there
            turned = torch.cat((turned[..., ::2], turned[..., 1::2]), -1)
        close(rows[0, :, 32:], turned[0])


def test_decodes_and_chunks_share_a_step(saved: Any, expected: Any) -> None:
    want = expected("v3")
    tokens, driver = want.tokens, Driver(ModelRunner(model_dir=saved("v3"), dtype="float32", num_blocks=40))
    starts = {"a": 15, "b": 130, "c": 64}
    driver.step({key: tokens[:end] for key, end in starts.items()})
    for turn in range(3):
        work = {key: tokens[end + turn : end + turn + 1] for key, end in starts.items()}
        got = driver.step(work | {"late": tokens[turn * 37 : (turn + 1) * 37]})
        for key, end in starts.items():
            close(got[key], want.logits[end + turn : end + turn + 1])
        close(got["late"], want.logits[turn * 37 : (turn + 1) * 37])


@pytest.mark.parametrize("name", ["v2, groups", "v3", "v3, groups"])
def test_deterministic_is_bitwise_and_near_transformers(name: str, saved: Any, expected: Any) -> None:
    want = expected(name)
    runner = ModelRunner(model_dir=saved(name), num_blocks=60, is_deterministic=True)
    whole = Driver(runner).step({"a": want.tokens})["a"]
    close(whole, want.logits)
    for chunk in (1, 37):
        assert torch.equal(Driver(runner).chunked("a", want.tokens, chunk), whole)


def test_bf16_stays_near_transformers_in_bf16(saved: Any) -> None:
    tokens = random_tokens(100, SHAPE["vocab_size"])
    want = compute_reference(saved("v3"), tokens, torch.bfloat16).logits
    got = Driver(ModelRunner(model_dir=saved("v3"), dtype="bfloat16", num_blocks=20)).chunked("a", tokens, 16)
    difference = (torch.log_softmax(got, -1) - torch.log_softmax(want, -1)).abs()
    assert difference.gather(1, want.argmax(-1, keepdim=True)).mean() < 0.05


@pytest.mark.parametrize(
    ("name", "changes", "complaint"),
    [
        ("v3", {"num_key_value_heads": 2}, "num_key_value_heads is 2"),
        ("v3", {"qk_rope_head_dim": 15}, "head_dim is 15"),
        ("v3", {"kv_lora_rank": 0}, "kv_lora_rank is 0"),
        ("v3", {"rope_interleave": "yes"}, "rope_interleave"),
        ("v2", {"rope_interleave": False}, "rope_interleave False is not supported"),
        ("v2, groups", {"norm_topk_prob": True}, "norm_topk_prob True is not supported"),
        ("v2, groups", {"topk_method": "noaux_tc"}, "topk_method noaux_tc is not supported"),
        ("v3, groups", {"scoring_func": "softmax"}, "scoring_func softmax is not supported"),
        ("v3, groups", {"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported"),
        ("v3, groups", {"n_group": 3}, "16 experts in 3 groups"),
        ("v3, groups", {"topk_group": 5}, "4 groups, 5 of them"),
        ("v3, groups", {"num_experts_per_tok": 9}, "2 groups of 4"),
    ],
)
def test_what_does_not_fit_is_named(
    name: str, changes: dict[str, Any], complaint: str, saved: Any, tmp_path: Path
) -> None:
    raw = json.loads((saved(name) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | changes))
    with pytest.raises(ModelError, match=complaint):
        read_model_config(tmp_path)


V3_PUBLISHED = {
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "bos_token_id": 0, "eos_token_id": 1,
    "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168, "intermediate_size": 18432,
    "kv_lora_rank": 512, "max_position_embeddings": 163840, "model_type": "deepseek_v3", "moe_intermediate_size": 2048,
    "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False,
    "topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip


def test_the_published_configs_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(V3_PUBLISHED))
    three = read_model_config(tmp_path)
    assert three.kv_shape == (1, 1, 576, True)
    assert kv_layout(three, dtype="bfloat16", block_tokens=16, tp=8).token_bytes() == 61 * 576 * 2
    assert three.attention_scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert (three.stored, three.unused_layers, three.longest_context) == (Fp8((128, 128)), 1, 163840)
    assert three.experts is not None
    assert (three.experts.layers, three.experts.shared) == (frozenset(range(3, 61)), 2048)
    lite = {
        "architectures": ["DeepseekV2ForCausalLM"], "first_k_dense_replace": 1, "n_group": 1, "n_routed_experts": 64,
        "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 16, "num_experts_per_tok": 6,
        "num_hidden_layers": 27, "num_key_value_heads": 16, "q_lora_rank": None, "routed_scaling_factor": 1.0,
        "scoring_func": "softmax", "topk_group": 1, "topk_method": "greedy", "moe_intermediate_size": 1408,
        "quantization_config": None, "aux_loss_alpha": 0.001, "seq_aux": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(V3_PUBLISHED | lite))
    two = read_model_config(tmp_path)
    assert two.latent is not None
    assert two.experts is not None
    assert (two.latent.query_rank, two.experts.groups, two.experts.shared) == (None, 1, 2816)
    assert (two.stored, two.experts.layers) == (None, frozenset(range(1, 27)))
