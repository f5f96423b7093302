"""Maps architectures of GGUF files to Hugging Face's terms: names of tensors, and metadata that changes answers.
Imports no torch.

A family is a row here. Metadata of an architecture that no row reads is refused by name, never ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tandem.core.gguf.model_files import GgufModel
from tandem.engine.gguf import deepseek
from tandem.engine.gguf.keys import MetadataReader

Extra = Callable[[MetadataReader, GgufModel], dict[str, Any]]
"""Fields of config.json beside those that all families have."""

_LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_GEMMA_LAYER = {
    **_LAYER, "ffn_norm": "pre_feedforward_layernorm", "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
_GPT_OSS_LAYER = {
    **{part: name for part, name in _LAYER.items() if part.startswith("attn_")},
    "post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFamily:
    """How files of one architecture spell a model.

    architecture        as in config.json
    layer               names of a layer's tensors without `blk.N.`, and their names behind `model.layers.N.`
    whole               the same of tensors with other last names, too
    experts             of tensors [experts, rows, columns], the place of each expert: in which block, by which name
    has_latent          heads are made of a latent; `more_fields` reads their widths
    has_turned_heads    rows of q and k are in the order of ggml's rotation, which turns neighbours and not halves
    has_raised_norms    norms are stored as 1 + weight
    reads               keys without the architecture that `more_fields` reads, beside those of all families
    """

    architecture: str
    layer: Mapping[str, str] = field(default_factory=lambda: _LAYER)
    whole: Mapping[str, str] = field(default_factory=dict)
    experts: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    has_latent: bool = False
    has_turned_heads: bool = False
    has_raised_norms: bool = False
    more_fields: Extra = lambda _keys, _model: {}
    reads: frozenset[str] = frozenset()


def _llama(_keys: MetadataReader, model: GgufModel) -> dict[str, Any]:
    return {
        "attention_bias": "blk.0.attn_q.bias" in model.file_of, "mlp_bias": "blk.0.ffn_up.bias" in model.file_of,
    }  # fmt: skip


def _mixtral(keys: MetadataReader, _model: GgufModel) -> dict[str, Any]:
    return {
        "num_local_experts": keys.experts(), "num_experts_per_tok": keys.positive("expert_used_count"),
        "sliding_window": None,
    }  # fmt: skip


def _qwen(_keys: MetadataReader, _model: GgufModel) -> dict[str, Any]:
    return {"use_sliding_window": False}


def _qwen3moe(keys: MetadataReader, _model: GgufModel) -> dict[str, Any]:
    """llama.cpp divides the weights of a token's experts by their sum in every file of this architecture."""
    return {
        "num_experts": keys.experts(), "num_experts_per_tok": keys.positive("expert_used_count"),
        "moe_intermediate_size": keys.positive("expert_feed_forward_length"), "norm_topk_prob": True,
        "use_sliding_window": False,
    }  # fmt: skip


def _gpt_oss(keys: MetadataReader, _model: GgufModel) -> dict[str, Any]:
    """Bounds of stretched frequencies are not whole pairs, though no key states it."""
    rope = keys.rope()
    return {
        "num_local_experts": keys.experts(), "num_experts_per_tok": keys.positive("expert_used_count"),
        "intermediate_size": keys.positive("expert_feed_forward_length"),
        "sliding_window": keys.positive("attention.sliding_window"),
        "rope_parameters": rope | ({"truncate": False} if rope.get("rope_type") == "yarn" else {}),
    }  # fmt: skip


def _gemma(keys: MetadataReader, large_layers: int) -> dict[str, Any]:
    """The size of `large_layers` layers, 27B, scales scores by hidden / heads: not in the metadata, from llama.cpp."""
    is_large = keys.positive("block_count") == large_layers
    scalar = keys.positive("embedding_length") / keys.positive("attention.head_count")
    return {
        "hidden_activation": "gelu_pytorch_tanh", "sliding_window": keys.positive("attention.sliding_window", 4096),
        "query_pre_attn_scalar": scalar if is_large else keys.positive("attention.key_length", 256),
        "head_dim": keys.positive("attention.key_length", 256),
    }  # fmt: skip


def _gemma2(keys: MetadataReader, _model: GgufModel) -> dict[str, Any]:
    return _gemma(keys, 46) | {
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
    }


def _gemma3(keys: MetadataReader, _model: GgufModel) -> dict[str, Any]:
    """Layers with a window turn by a base of their own, and are never stretched."""
    rope, local = keys.rope(1e6), keys.number("rope.freq_base_swa", 1e4)
    return _gemma(keys, 62) | {
        "sliding_window_pattern": keys.positive("attention.sliding_window_pattern", 6),
        "rope_parameters": {"full_attention": rope, "sliding_attention": {"rope_theta": local}},
        "attn_logit_softcapping": None, "final_logit_softcapping": keys.number("final_logit_softcapping"),
    }  # fmt: skip


_WINDOW = frozenset({"attention.sliding_window"})
_CAPS = frozenset({"attn_logit_softcapping", "final_logit_softcapping"})
_EXPERTS = frozenset({"expert_count", "expert_used_count"})
_EXPERT_NAMES = ("gate", "up", "down")


def _experts(block: str, *names: str) -> dict[str, tuple[str, str]]:
    return {f"ffn_{name}_exps": (block, own) for name, own in zip(_EXPERT_NAMES, names, strict=True)}


FAMILIES: dict[str, GgufFamily] = {
    "llama": GgufFamily(architecture="LlamaForCausalLM", has_turned_heads=True, more_fields=_llama),
    "llama with experts": GgufFamily(
        architecture="MixtralForCausalLM", has_turned_heads=True, more_fields=_mixtral, reads=_EXPERTS,
        layer=_LAYER | {"ffn_gate_inp": "block_sparse_moe.gate"},
        experts=_experts("block_sparse_moe", "w1", "w3", "w2"),
    ),
    "qwen2": GgufFamily(architecture="Qwen2ForCausalLM", more_fields=_qwen),
    "qwen3": GgufFamily(architecture="Qwen3ForCausalLM", more_fields=_qwen),
    "qwen3moe": GgufFamily(
        architecture="Qwen3MoeForCausalLM", more_fields=_qwen3moe, reads=_EXPERTS | {"expert_feed_forward_length"},
        layer=_LAYER | {"ffn_gate_inp": "mlp.gate"}, experts=_experts("mlp", "gate_proj", "up_proj", "down_proj"),
    ),
    "gpt-oss": GgufFamily(
        architecture="GptOssForCausalLM", layer=_GPT_OSS_LAYER, whole={"attn_sinks.weight": "self_attn.sinks"},
        experts=_experts("mlp", "gate_proj", "up_proj", "down_proj"), more_fields=_gpt_oss,
        reads=_EXPERTS | _WINDOW | {"expert_feed_forward_length"},
    ),
    "deepseek2": GgufFamily(
        architecture="DeepseekV3ForCausalLM", layer=deepseek.LAYER, has_latent=True,
        whole={"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"},
        experts=_experts("mlp", "gate_proj", "up_proj", "down_proj"), more_fields=deepseek.deepseek_fields,
        reads=deepseek.READS,
    ),
    "gemma2": GgufFamily(
        architecture="Gemma2ForCausalLM", layer=_GEMMA_LAYER, has_raised_norms=True, more_fields=_gemma2,
        reads=_WINDOW | _CAPS,
    ),
    "gemma3": GgufFamily(
        architecture="Gemma3ForCausalLM", layer=_GEMMA_LAYER, has_raised_norms=True, more_fields=_gemma3,
        reads=_WINDOW | _CAPS | {"rope.freq_base_swa", "attention.sliding_window_pattern"},
    ),
}  # fmt: skip
"""By `general.architecture`; one that has experts and no row of its own for them is `… with experts`."""


def family_of(model: GgufModel) -> GgufFamily:
    """The row of the file's architecture; raises ModelError for one that is not computed."""
    name = model.metadata.text("general.architecture")
    has_experts = (model.metadata.whole(f"{name}.expert_count", 0) or 0) > 0
    found = FAMILIES.get(f"{name} with experts") if has_experts else None
    found = found or FAMILIES.get(name)
    if found is None:
        known = ", ".join(one for one in FAMILIES if " " not in one)
        raise model.metadata.error(
            "general.architecture", f"it is {name[:64]!r}, and Tandem computes {known}",
            "serve a model of one of these, or this one's safetensors",
        )  # fmt: skip
    return found
