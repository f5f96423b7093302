"""Makes a random, tiny model in Hugging Face format: for tests, and to measure shapes that no checkpoint has.

    python tools/random_model.py qwen3 build/tiny-qwen3 --hidden 64 --layers 2 --heads 4 --kv-heads 2

Embeddings are untied and weights wide (standard deviation 0.08), so that greedy answers do not repeat one token. The
tokenizer is the bundled model's where the vocabulary has room for it, else one token a byte.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tandem.kernels.dtypes import TORCH_DTYPES

BUNDLED = Path(__file__).resolve().parent.parent / "models" / "tandem-tiny"
ARCHITECTURES = {
    "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM", "gemma2": "Gemma2ForCausalLM", "gemma3": "Gemma3ForCausalLM",
    "mixtral": "MixtralForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM",
}  # fmt: skip


GEMMAS = ("gemma2", "gemma3")
EXPERT_NAMES = {
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
    "qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "deepseek_v2": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "deepseek_v3": ("mlp", "gate_proj", "up_proj", "down_proj"),
}
"""Names in families with experts: their block of a layer, and gate, up and down of each."""
LATENTS = ("deepseek_v2", "deepseek_v3")
LATENT_RANK, PLAIN, TURNED, VALUE = 32, 12, 16, 20
"""Of a latent and of the parts of a head; `head_dim` and `kv_heads` mean nothing there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomModel:
    """The shape to make; `head_dim` 0 means hidden / heads, `intermediate` 0 means three times hidden.

    `window`: tokens of the sliding window in families that have one, 0 for none. `experts`, `experts_per_token` and
    `expert_intermediate` (0: as `intermediate`) are of mixtures of experts. `has_biases`: on every product of a layer;
    Llama's alone may.
    """

    family: str
    hidden: int = 64
    intermediate: int = 0
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 0
    vocab: int = 512
    max_positions: int = 2048
    seed: int = 0
    dtype: str = "float32"
    std: float = 0.08
    is_tied: bool = False
    window: int = 40
    experts: int = 8
    experts_per_token: int = 2
    expert_intermediate: int = 0
    has_biases: bool = False

    @property
    def features(self) -> int:
        """Features of the MLP, or of each expert."""
        features = self.intermediate or 3 * self.hidden
        return (self.expert_intermediate or features) if self.family in (*EXPERT_NAMES, "gpt_oss") else features


def make_random_model(model: RandomModel, folder: Path) -> None:
    """Write config, weights and tokenizer into `folder`, which is made; the same arguments give the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    config = _config(model)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 1})
    save_file(_weights(model), folder / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(model, folder)


def _config(model: RandomModel) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[model.family]],
        "model_type": "gemma3_text" if model.family == "gemma3" else model.family,
        "vocab_size": model.vocab,
        "hidden_size": model.hidden,
        "intermediate_size": model.intermediate or 3 * model.hidden,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim or model.hidden // model.heads,
        "hidden_act": "silu",
        "max_position_embeddings": model.max_positions,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": model.is_tied,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": model.dtype,
    }
    if model.has_biases:
        config |= {"attention_bias": True, "mlp_bias": True}
    if model.family == "mistral":
        config["sliding_window"] = model.window or None
    if model.family in GEMMAS:
        config |= {
            "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 24, "sliding_window": model.window,
            "attn_logit_softcapping": None, "final_logit_softcapping": None,
        }  # fmt: skip
    if model.family == "gemma2":  # caps low enough to be felt by weights like these
        config |= {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0}
    if model.family == "gemma3":
        config |= {"sliding_window_pattern": 2, "rope_theta": 1e6, "rope_local_base_freq": 10000.0}
    if model.family == "mixtral":
        config |= {"num_local_experts": model.experts, "num_experts_per_tok": model.experts_per_token}
        config |= {"intermediate_size": model.features, "sliding_window": None}
    if model.family == "qwen3_moe":
        config |= {
            "num_experts": model.experts, "num_experts_per_tok": model.experts_per_token, "norm_topk_prob": True,
            "moe_intermediate_size": model.features, "decoder_sparse_step": 1, "mlp_only_layers": [],
        }  # fmt: skip
    if model.family == "gpt_oss":
        config |= {
            "num_local_experts": model.experts, "num_experts_per_tok": model.experts_per_token, "attention_bias": True,
            "intermediate_size": model.features, "sliding_window": model.window, "rope_theta": 150000.0,
            "swiglu_limit": 0.5, "swiglu_alpha": 1.702,  # a limit that is felt by weights like these
            "layer_types": ["full_attention" if layer % 2 else "sliding_attention" for layer in range(model.layers)],
            "rope_scaling": {
                "rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                "original_max_position_embeddings": model.max_positions // 4,
            },
        }  # fmt: skip
    if model.family in ("qwen2", "qwen3", "qwen3_moe"):
        config |= {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": model.layers}
    if model.family in LATENTS:
        config |= _latent_config(model)
    return config


def _latent_config(model: RandomModel) -> dict[str, Any]:
    """Version 2 makes queries of what comes in, version 3 of a latent; version 3 stretches positions. The first layer
    has no experts."""
    config: dict[str, Any] = {
        "num_key_value_heads": model.heads, "head_dim": TURNED, "kv_lora_rank": LATENT_RANK, "qk_nope_head_dim": PLAIN,
        "qk_rope_head_dim": TURNED, "v_head_dim": VALUE, "q_lora_rank": None, "first_k_dense_replace": 1,
        "n_routed_experts": model.experts, "num_experts_per_tok": model.experts_per_token, "n_shared_experts": 1,
        "moe_intermediate_size": model.features,
        "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5,
        "norm_topk_prob": False,
    }  # fmt: skip
    if model.family == "deepseek_v3":
        scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "mscale": 0.7}
        config |= {"q_lora_rank": LATENT_RANK, "rope_scaling": scaling | {"mscale_all_dim": 1.2}}
        config |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True}
    return config


def _weights(model: RandomModel) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(model.seed)
    head_dim = model.head_dim or model.hidden // model.heads
    wide, narrow = model.heads * head_dim, model.kv_heads * head_dim
    made: dict[str, torch.Tensor] = {}

    def draw(name: str, *shape: int, around: float = 0.0, std: float = model.std) -> None:
        values = torch.randn(shape, generator=generator) * std + around
        made[name] = values.to(TORCH_DTYPES[model.dtype])

    is_gemma, is_latent = model.family in GEMMAS, model.family in LATENTS
    norm = 0.0 if is_gemma else 1.0  # Gemma's norms multiply by 1 + weight
    draw("model.embed_tokens.weight", model.vocab, model.hidden)
    for index in range(model.layers):
        layer = f"model.layers.{index}"
        for name, rows in (("q_proj", wide), ("k_proj", narrow), ("v_proj", narrow)) * (not is_latent):
            draw(f"{layer}.self_attn.{name}.weight", rows, model.hidden)
            if model.family in ("qwen2", "gpt_oss"):
                draw(f"{layer}.self_attn.{name}.bias", rows)
        if model.family in ("qwen3", "gemma3", "qwen3_moe"):
            draw(f"{layer}.self_attn.q_norm.weight", head_dim, around=norm)
            draw(f"{layer}.self_attn.k_norm.weight", head_dim, around=norm)
        if is_latent:
            _draw_latent(model, f"{layer}.self_attn", draw)
        draw(f"{layer}.self_attn.o_proj.weight", model.hidden, model.heads * VALUE if is_latent else wide)
        mlps, (gate, up, down) = [f"{layer}.mlp"], ("gate_proj", "up_proj", "down_proj")
        if model.family in EXPERT_NAMES and not (is_latent and index == 0):
            block, gate, up, down = EXPERT_NAMES[model.family]
            mlps = [f"{layer}.{block}.experts.{expert}" for expert in range(model.experts)]
            # Wide, so that experts are chosen clearly.
            draw(f"{layer}.{block}.gate.weight", model.experts, model.hidden, std=4 * model.std)
            mlps += [f"{layer}.{block}.shared_experts"] if is_latent else []
            if model.family == "deepseek_v3":
                draw(f"{layer}.{block}.gate.e_score_correction_bias", model.experts)
        if model.family == "gpt_oss":
            mlps = []
            _draw_gpt_oss(model, layer, draw)
        for mlp in mlps:
            draw(f"{mlp}.{gate}.weight", model.features, model.hidden)
            draw(f"{mlp}.{up}.weight", model.features, model.hidden)
            draw(f"{mlp}.{down}.weight", model.hidden, model.features)
        if model.has_biases:
            for name, rows in (("q_proj", wide), ("k_proj", narrow), ("v_proj", narrow), ("o_proj", model.hidden)):
                draw(f"{layer}.self_attn.{name}.bias", rows)
            for name, rows in ((gate, model.features), (up, model.features), (down, model.hidden)):
                draw(f"{layer}.mlp.{name}.bias", rows)
        norms = ["input_layernorm", "post_attention_layernorm"]
        for name in norms + ["pre_feedforward_layernorm", "post_feedforward_layernorm"] * is_gemma:
            draw(f"{layer}.{name}.weight", model.hidden, around=norm)
    draw("model.norm.weight", model.hidden, around=norm)
    if not model.is_tied:
        draw("lm_head.weight", model.vocab, model.hidden)
    return made


def _draw_gpt_oss(model: RandomModel, layer: str, draw: Callable[..., None]) -> None:
    """Sinks, biases, and experts, those of a layer in one tensor, with inputs first."""
    experts, pair = model.experts, 2 * model.features
    draw(f"{layer}.self_attn.o_proj.bias", model.hidden)
    draw(f"{layer}.self_attn.sinks", model.heads, std=1.0)
    draw(f"{layer}.mlp.router.weight", experts, model.hidden, std=4 * model.std)
    draw(f"{layer}.mlp.router.bias", experts)
    draw(f"{layer}.mlp.experts.gate_up_proj", experts, model.hidden, pair)
    draw(f"{layer}.mlp.experts.gate_up_proj_bias", experts, pair)
    draw(f"{layer}.mlp.experts.down_proj", experts, model.features, model.hidden)
    draw(f"{layer}.mlp.experts.down_proj_bias", experts, model.hidden)


def _draw_latent(model: RandomModel, attention: str, draw: Callable[..., None]) -> None:
    queries = model.heads * (PLAIN + TURNED)
    if model.family == "deepseek_v3":
        draw(f"{attention}.q_a_proj.weight", LATENT_RANK, model.hidden)
        draw(f"{attention}.q_a_layernorm.weight", LATENT_RANK, around=1.0)
        draw(f"{attention}.q_b_proj.weight", queries, LATENT_RANK)
    else:
        draw(f"{attention}.q_proj.weight", queries, model.hidden)
    draw(f"{attention}.kv_a_proj_with_mqa.weight", LATENT_RANK + TURNED, model.hidden)
    draw(f"{attention}.kv_a_layernorm.weight", LATENT_RANK, around=1.0)
    draw(f"{attention}.kv_b_proj.weight", model.heads * (PLAIN + VALUE), LATENT_RANK)


def _write_tokenizer(model: RandomModel, folder: Path) -> None:
    bundled = BUNDLED / "tokenizer.json"
    if bundled.exists():
        tokens = json.loads(bundled.read_text(encoding="utf-8"))["model"]["vocab"]
        if len(tokens) <= model.vocab:
            for name in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copyfile(BUNDLED / name, folder / name)
            return
    _write_byte_tokenizer(model, folder)


def _write_byte_tokenizer(model: RandomModel, folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    specials = ["<bos>", "<eos>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*specials, *alphabet][: model.vocab]
    tokenizer = Tokenizer(BPE(vocab={name: number for number, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>",
        "model_max_length": model.max_positions,
        "chat_template": "{% for message in messages %}{{ message['content'] }}\n{% endfor %}",
    }  # fmt: skip
    _write_json(folder / "tokenizer_config.json", about)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=sorted(ARCHITECTURES))
    parser.add_argument("out", type=Path, help="folder to write")
    for name, value in (("hidden", 64), ("intermediate", 0), ("layers", 2), ("heads", 4), ("kv-heads", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, value in (("head-dim", 0), ("vocab", 512), ("max-positions", 2048), ("seed", 0), ("window", 40)):
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, value in (("experts", 8), ("experts-per-token", 2), ("expert-intermediate", 0)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtype", choices=sorted(TORCH_DTYPES), default="float32")
    parser.add_argument("--std", type=float, default=0.08, help="standard deviation of the weights")
    parser.add_argument("--tied", action="store_true", dest="is_tied", help="tie the embeddings")
    values = vars(parser.parse_args(argv))
    folder: Path = values.pop("out")
    if values["heads"] % values["kv_heads"]:
        parser.error(f"{values['heads']} heads cannot share {values['kv_heads']} KV heads evenly")
    make_random_model(RandomModel(**values), folder)
    print(f"wrote {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
