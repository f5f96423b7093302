"""Writes a folder in Hugging Face format as a GGUF file, as llama.cpp's converter does: for tests and proofs.

    python tools/gguf_model.py build/tiny-qwen3 build/tiny-qwen3.gguf --type Q4_0

Names come from the `gguf` package, which has to be installed. Vectors, and rows that are no whole blocks, stay F32.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file

ARCHITECTURES = {
    "LlamaForCausalLM": "llama", "MixtralForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3", "Qwen3MoeForCausalLM": "qwen3moe", "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3", "GptOssForCausalLM": "gpt-oss", "DeepseekV2ForCausalLM": "deepseek2",
    "DeepseekV3ForCausalLM": "deepseek2",
}  # fmt: skip
_RAISED = ("gemma2", "gemma3")
_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
_STACKED = {"w1": "gate", "w3": "up", "w2": "down", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
Tensors = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufModel:
    """Contents of the file: numbers of matrices as `kind`, at most `split_tensors` a file, 0 = one file.
    `has_whole_latent`: of DeepSeek, as converters did before they cut `attn_kv_b` in two."""

    kind: str = "F32"
    split_tensors: int = 0
    has_tokenizer: bool = True
    has_whole_latent: bool = False


def write_gguf(folder: Path, out: Path, options: GgufModel | None = None) -> None:
    """The model in `folder` as the GGUF file `out`. Raises KeyError for an architecture that is not written."""
    import gguf

    options = options or GgufModel()
    config = json.loads((folder / "config.json").read_text("utf-8"))
    name = ARCHITECTURES[config["architectures"][0]]
    writer = gguf.GGUFWriter(out, name, split_max_tensors=options.split_tensors)
    _add_config(writer, config, name)
    if name == "deepseek2":
        _add_deepseek(writer, config, has_mla=not options.has_whole_latent)
    if options.has_tokenizer:
        _add_tokenizer(writer, folder, config)
    stored = load_file(folder / "model.safetensors")
    tensors = {key: (value if _is_packed(key) else value.float()).numpy() for key, value in stored.items()}
    names = gguf.get_tensor_name_map(
        next(arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == name), config["num_hidden_layers"]
    )
    if name == "gpt-oss":
        tensors = _unpaired(tensors)
    elif name == "deepseek2" and not options.has_whole_latent:
        tensors = _halved(tensors, config)
    for key, value in _converted(tensors, config, name).items():
        stem, _, suffix = key.rpartition(".")
        found = names.get_name(stem) or "output"  # Gemma 2 has no name for a head: published ones are tied
        if value.dtype == np.uint8:
            writer.add_tensor(f"{found}.{suffix}", value, raw_dtype=gguf.GGMLQuantizationType.MXFP4)
            continue
        kind = gguf.GGMLQuantizationType[options.kind if _fits(value, options.kind) else "F32"]
        writer.add_tensor(f"{found}.{suffix}", gguf.quants.quantize(value, kind), raw_dtype=kind)
    if (factors := _rope_factors(config)) is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _is_packed(key: str) -> bool:
    return key.endswith(("_blocks", "_scales"))


def _fits(value: Any, kind: str) -> bool:
    import gguf

    block, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return bool(value.ndim > 1 and value.shape[-1] % block == 0)


def _add_config(writer: Any, config: dict[str, Any], name: str) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    if name != "deepseek2":
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    if name == "gpt-oss":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if name in _RAISED:
        writer.add_sliding_window(config["sliding_window"])
        if "sliding_window_pattern" in config:
            writer.add_sliding_window_pattern(config["sliding_window_pattern"])
        if config["final_logit_softcapping"]:
            writer.add_final_logit_softcapping(config["final_logit_softcapping"])
            writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if experts := next(filter(None, map(config.get, _COUNTS)), None):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    scaling = config.get("rope_scaling") or {}
    kind = scaling.get("rope_type") or scaling.get("type")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(getattr(_scaling_types(), kind.upper()))
        writer.add_rope_scaling_factor(scaling["factor"])
        if kind == "yarn":
            writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])


def _add_deepseek(writer: Any, config: dict[str, Any], *, has_mla: bool) -> None:
    import gguf

    key, value = config["qk_nope_head_dim"] + config["qk_rope_head_dim"], config["v_head_dim"]
    writer.add_kv_lora_rank(config["kv_lora_rank"])
    if config["q_lora_rank"]:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_head_count_kv(1 if has_mla else config["num_attention_heads"])
    writer.add_key_length(config["kv_lora_rank"] + config["qk_rope_head_dim"] if has_mla else key)
    writer.add_value_length(config["kv_lora_rank"] if has_mla else value)
    if has_mla:
        writer.add_key_length_mla(key)
        writer.add_value_length_mla(value)
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    if config["norm_topk_prob"]:
        writer.add_expert_weights_norm(True)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType[config.get("scoring_func", "softmax").upper()])
    writer.add_expert_group_count(config["n_group"])
    writer.add_expert_group_used_count(config["topk_group"])
    if multiplier := (config.get("rope_scaling") or {}).get("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(0.1 * multiplier)


def _scaling_types() -> Any:
    import gguf

    return gguf.RopeScalingType


def _rope_factors(config: dict[str, Any]) -> Any:
    """As the converter makes them of Llama 3's scaling."""
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") != "llama3":
        return None
    old, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    factors = []
    for place in range(0, config["head_dim"], 2):
        length = 2 * np.pi * config["rope_theta"] ** (place / config["head_dim"])
        if length < old / high:
            factors.append(1.0)
        elif length > old / low:
            factors.append(factor)
        else:
            smooth = (old / length - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, dtype=np.float32)


def _unpaired(tensors: Tensors) -> Tensors:
    """gpt-oss: gates and ups, which lie in turns, apart, outputs first; packed numbers in ggml's blocks."""
    made: Tensors = {}
    for key, value in tensors.items():
        stem, _, ending = key.rpartition("_")
        if key.endswith("_scales"):
            continue
        if key.endswith("_blocks"):
            rows, suffix = _in_blocks(value, tensors[f"{stem}_scales"]), "weight"
        elif key.endswith(("gate_up_proj", "down_proj")):
            stem, rows, suffix = key, value.swapaxes(1, 2), "weight"
        elif ending == "bias":
            rows, suffix = value, "bias"
        else:
            made[f"{key}.weight" if key.endswith("sinks") else key] = value
            continue
        if stem.endswith("down_proj"):
            made[f"{stem}.{suffix}"] = np.ascontiguousarray(rows)
        else:
            for place, name in enumerate(("gate_proj", "up_proj")):
                made[f"{stem.removesuffix('gate_up_proj')}{name}.{suffix}"] = np.ascontiguousarray(rows[:, place::2])
    return made


def _in_blocks(blocks: Any, scales: Any) -> Any:
    """[..., groups, 16] of numbers in turns as ggml's MXFP4: the scale, then the first half of a group beside the
    second."""
    numbers = np.stack((blocks & 15, blocks >> 4), -1).reshape(*scales.shape, 32)
    halves = numbers[..., :16] | numbers[..., 16:] << 4
    return np.concatenate((scales[..., None], halves), -1).reshape(*scales.shape[:-1], -1)


def _halved(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """DeepSeek: what makes keys of a latent, turned over, and what makes values apart."""
    made: Tensors = {}
    for key, value in tensors.items():
        if "kv_b_proj" not in key:
            made[key] = value
            continue
        heads = value.reshape(config["num_attention_heads"], -1, value.shape[1])
        keys, values = heads[:, : config["qk_nope_head_dim"]], heads[:, config["qk_nope_head_dim"] :]
        made[key.replace("kv_b_proj", "k_b_proj")] = np.ascontiguousarray(keys.swapaxes(1, 2))
        made[key.replace("kv_b_proj", "v_b_proj")] = np.ascontiguousarray(values)
    return made


def _converted(tensors: Tensors, config: dict[str, Any], name: str) -> Tensors:
    """Heads turned, norms raised and experts stacked as files of the architecture have them."""
    made: Tensors = {}
    stacks: dict[str, list[Any]] = {}
    for key, value in tensors.items():
        if ".experts." in key and name != "gpt-oss":
            block, _, rest = key.partition(".experts.")
            own = rest.split(".")[1]
            stacks.setdefault(f"{block}.experts.{own}.weight", []).append((int(rest.split(".")[0]), value))
            continue
        if name == "llama" and ("q_proj" in key or "k_proj" in key):
            heads = config["num_attention_heads" if "q_proj" in key else "num_key_value_heads"]
            value = _turned(value, heads)
        if name in _RAISED and key.endswith("norm.weight"):
            value = value + 1
        made[key.replace("e_score_correction_bias", "e_score_correction.bias")] = value
    for key, values in stacks.items():
        made[key] = np.stack([value for _, value in sorted(values, key=lambda pair: pair[0])])
    return made


def _turned(value: Any, heads: int) -> Any:
    """llama.cpp's `permute`: neighbours turn together in ggml's rotation, halves of a head in transformers'."""
    rows = len(value) // heads
    return value.reshape(heads, 2, rows // 2, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)


def _add_tokenizer(writer: Any, folder: Path, config: dict[str, Any]) -> None:
    """A byte-level BPE tokenizer.json."""
    raw = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    settings = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    added = {token["id"]: token for token in raw["added_tokens"]}
    texts = {number: token for token, number in raw["model"]["vocab"].items()}
    texts |= {number: token["content"] for number, token in added.items()}
    size = config["vocab_size"]
    kinds = [5 if n not in texts else 1 if n not in added else 3 if added[n]["special"] else 4 for n in range(size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([texts.get(number, f"[PAD{number}]") for number in range(size)])
    writer.add_token_types(kinds)
    merges = raw["model"]["merges"]
    if merges:
        writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(config.get("bos_token_id") or 0)
    writer.add_add_bos_token("TemplateProcessing" in json.dumps(raw["post_processor"]))
    eos = config.get("eos_token_id") or 0
    writer.add_eos_token_id(eos[0] if isinstance(eos, list) else eos)
    if settings.get("chat_template"):
        writer.add_chat_template(settings["chat_template"])


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a model in Hugging Face format, in one safetensors file")
    parser.add_argument("out", type=Path, help="file to write")
    parser.add_argument("--type", default="F32", dest="kind", help="of the numbers of matrices, such as Q8_0")
    parser.add_argument("--split", type=int, default=0, dest="split_tensors", help="tensors a file, 0 = all")
    values = parser.parse_args(argv)
    write_gguf(values.folder, values.out, GgufModel(kind=values.kind, split_tensors=values.split_tensors))
    print(f"wrote {values.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
