"""Metadata of DeepSeek's files, `deepseek2`, as fields of a config.json. Imports no torch.

Files have two versions: as llama.cpp computes today, with one KV head as wide as a cached row, the heads' own widths
in `…_mla` and `attn_kv_b` in two pieces; and as it did before, with the heads' widths alone and `attn_kv_b` whole.
"""

from __future__ import annotations

from typing import Any

from tandem.core.gguf.model_files import GgufModel
from tandem.engine.gguf.keys import MetadataReader

READS = frozenset({
    "attention.q_lora_rank", "attention.kv_lora_rank", "attention.key_length_mla", "attention.value_length_mla",
    "leading_dense_block_count", "expert_count", "expert_used_count", "expert_feed_forward_length",
    "expert_shared_count", "expert_weights_scale", "expert_weights_norm", "expert_gating_func", "expert_group_count",
    "expert_group_used_count", "rope.scaling.yarn_log_multiplier",
})  # fmt: skip
LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm", "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa", "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj", "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}  # fmt: skip
PAIR = ("attn_k_b", "attn_v_b")
"""The two pieces of `attn_kv_b`: [heads, rank, numbers of a key] and [heads, numbers of a value, rank]."""
_SOFTMAX, _SIGMOID = 1, 2
_MULTIPLIER = 0.1
"""Of `mscale_all_dim` in `yarn_log_multiplier`."""


def deepseek_fields(keys: MetadataReader, _model: GgufModel) -> dict[str, Any]:
    """Raises ModelError with the key that is wrong."""
    query, turned = (keys.positive(name) for name in (_width(keys, "key"), "rope.dimension_count"))
    if turned >= query:
        raise keys.error("rope.dimension_count", f"it is {turned}, and a head's query has {query} numbers")
    has_queries = keys.has("attention.q_lora_rank")
    return {
        "num_key_value_heads": keys.positive("attention.head_count"), "head_dim": turned,
        "q_lora_rank": keys.positive("attention.q_lora_rank") if has_queries else None,
        "kv_lora_rank": keys.positive("attention.kv_lora_rank"), "qk_nope_head_dim": query - turned,
        "qk_rope_head_dim": turned, "v_head_dim": keys.positive(_width(keys, "value")), "rope_parameters": _rope(keys),
        **_experts(keys),
    }  # fmt: skip


def _width(keys: MetadataReader, of: str) -> str:
    """The key with the width of a head."""
    name = f"attention.{of}_length"
    return f"{name}_mla" if keys.has(f"{name}_mla") else name


def _rope(keys: MetadataReader) -> dict[str, Any]:
    """Both mscales are the same in all models that were published, so that rotations have no length of their own."""
    rope, multiplier = keys.rope(), keys.number("rope.scaling.yarn_log_multiplier")
    if rope.get("rope_type") != "yarn":
        return rope
    rope["attention_factor"] = 1.0
    if multiplier is not None:
        rope["mscale_all_dim"] = round(multiplier / _MULTIPLIER, 6)  # stored as fp32
    return rope


def _experts(keys: MetadataReader) -> dict[str, Any]:
    """Version 3 has sigmoids. A file without groups has one, as llama.cpp computes it."""
    if not keys.count("expert_count"):
        return {"first_k_dense_replace": keys.positive("block_count"), "architectures": ["DeepseekV2ForCausalLM"]}
    gating, groups = keys.count("expert_gating_func") or _SOFTMAX, keys.count("expert_group_count") or 1
    if gating not in (_SOFTMAX, _SIGMOID):
        raise keys.error("expert_gating_func", f"it is {gating}, and {_SOFTMAX} and {_SIGMOID} are computed")
    is_sigmoid = gating == _SIGMOID
    return {
        "architectures": ["DeepseekV3ForCausalLM" if is_sigmoid else "DeepseekV2ForCausalLM"],
        "topk_method": "noaux_tc" if is_sigmoid else "group_limited_greedy" if groups > 1 else "greedy",
        "first_k_dense_replace": keys.count("leading_dense_block_count"),
        "n_routed_experts": keys.experts(), "num_experts_per_tok": keys.positive("expert_used_count"),
        "moe_intermediate_size": keys.positive("expert_feed_forward_length"),
        "n_shared_experts": keys.count("expert_shared_count"), "norm_topk_prob": keys.flag("expert_weights_norm"),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0), "n_group": groups,
        "topk_group": keys.count("expert_group_used_count") or groups,
    }  # fmt: skip
