"""The supported families: one row an architecture, with its differences from plain Llama. Imports no torch.

A family is a row here, computed by `models/decoder.py`. Only a new forward graph is a new file in `models`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tandem.engine import experts_config as experts
from tandem.engine.config_fields import Fields
from tandem.engine.experts_config import ExpertsConfig
from tandem.engine.latent_config import DEFAULTS as LATENT_DEFAULTS


def no_layer(_raw: Fields, _layers: int) -> Iterable[int]:
    return ()


def every_layer(_raw: Fields, layers: int) -> Iterable[int]:
    return range(layers)


def late_layers(raw: Fields, layers: int) -> Iterable[int]:
    """Qwen: the layers from `max_window_layers` on."""
    first = raw.get("max_window_layers")
    return range(0 if first == 0 else raw.positive("max_window_layers"), layers)


def all_but_each_nth(raw: Fields, layers: int) -> Iterable[int]:
    """Gemma: every layer but each `sliding_window_pattern`-th."""
    pattern = raw.positive("sliding_window_pattern")
    return (layer for layer in range(layers) if (layer + 1) % pattern)


def every_other_layer(_raw: Fields, layers: int) -> Iterable[int]:
    """gpt-oss: the first, the third, …"""
    return range(0, layers, 2)


_NULL_FIELDS = frozenset({"sliding_window", "attn_logit_softcapping", "final_logit_softcapping", "q_lora_rank"})
"""Of all families: no window, no cap, queries that are made at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilySpec:
    """How one architecture differs from plain Llama.

    qkv_bias                None: the config's `attention_bias` decides
    windowed                the layers with the sliding window, where the config has one and no `layer_types`
    has_window_switch       the window is one only if `use_sliding_window` is true
    has_local_rope          layers with a window have a rotation of their own
    has_unit_offset_norms   norms multiply by 1 + weight
    has_output_norms        attention and MLP have norms behind them, too
    scales_embedding        embeddings are multiplied by the root of the hidden size
    experts                 reads the mixture of experts that some layers have in place of the MLP
    has_sinks               every head has a logit that joins the softmax's denominator
    has_float_norms         norms multiply in fp32, before they round
    quantizations           names in `quantization_config` that are supported; such weights are read into plain ones
    has_latent              attention caches a latent instead of keys and values
    defaults                transformers' values for fields that config.json leaves out, or has as null
    null_fields             fields with a null that means "none", as in transformers, and not "take the default"
    reads                   fields among `ANSWER_FIELDS` that are computed, and `layer_types` where those may differ
    """

    qkv_bias: bool | None = None
    has_qk_norm: bool = False
    windowed: Callable[[Fields, int], Iterable[int]] = no_layer
    has_window_switch: bool = False
    has_local_rope: bool = False
    has_unit_offset_norms: bool = False
    has_output_norms: bool = False
    scales_embedding: bool = False
    experts: Callable[[Fields, int], ExpertsConfig | None] | None = None
    has_sinks: bool = False
    has_float_norms: bool = False
    quantizations: frozenset[str] = frozenset()
    has_latent: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    null_fields: frozenset[str] = _NULL_FIELDS
    reads: frozenset[str] = frozenset()

    def with_defaults(self, raw: Fields) -> Fields:
        """The fields of `raw`, and the defaults of those that it does not state."""
        said = {name: value for name, value in raw.values.items() if value is not None or name in self.null_fields}
        return Fields({**self.defaults, **said}, raw.path)


_QWEN_WINDOW: dict[str, Any] = {"sliding_window": 4096, "max_window_layers": 28}
_QWEN_READS = frozenset({"attention_bias", "layer_types", "use_sliding_window"})
_GEMMA: dict[str, Any] = {
    "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "sliding_window": 4096,
    "tie_word_embeddings": True,
}  # fmt: skip
_GEMMA_READS = frozenset({
    "attention_bias", "attn_logit_softcapping", "final_logit_softcapping", "hidden_activation", "layer_types",
    "query_pre_attn_scalar",
})  # fmt: skip

_DEEPSEEK_READS = frozenset({
    "attention_bias", "first_k_dense_replace", "n_group", "n_shared_experts", "norm_topk_prob", "routed_scaling_factor",
    "scoring_func", "topk_group", "topk_method",
})  # fmt: skip

FAMILIES: dict[str, FamilySpec] = {
    "LlamaForCausalLM": FamilySpec(reads=frozenset({"attention_bias", "mlp_bias"})),
    "MistralForCausalLM": FamilySpec(qkv_bias=False, windowed=every_layer, defaults={"sliding_window": 4096}),
    "Qwen2ForCausalLM": FamilySpec(
        qkv_bias=True, windowed=late_layers, has_window_switch=True, defaults=_QWEN_WINDOW,
        reads=_QWEN_READS,
    ),
    "Qwen3ForCausalLM": FamilySpec(
        has_qk_norm=True, windowed=late_layers, has_window_switch=True, defaults=_QWEN_WINDOW | {"head_dim": 128},
        reads=_QWEN_READS,
    ),
    "Gemma2ForCausalLM": FamilySpec(
        windowed=all_but_each_nth, has_unit_offset_norms=True, has_output_norms=True, scales_embedding=True,
        defaults=_GEMMA | {
            "sliding_window_pattern": 2, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        },
        reads=_GEMMA_READS,
    ),
    "Gemma3ForCausalLM": FamilySpec(
        has_qk_norm=True, windowed=all_but_each_nth, has_local_rope=True, has_unit_offset_norms=True,
        has_output_norms=True, scales_embedding=True, defaults=_GEMMA | {"sliding_window_pattern": 6},
        reads=_GEMMA_READS,
    ),
    "MixtralForCausalLM": FamilySpec(
        qkv_bias=False, windowed=every_layer, experts=experts.mixtral_experts,
        defaults={"num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "Qwen3MoeForCausalLM": FamilySpec(
        has_qk_norm=True, windowed=every_layer, has_window_switch=True, experts=experts.qwen3_experts,
        defaults={"sliding_window": 4096, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
        reads=frozenset({
            "attention_bias", "decoder_sparse_step", "mlp_only_layers", "norm_topk_prob", "use_sliding_window",
        }),
    ),
    "GptOssForCausalLM": FamilySpec(
        windowed=every_other_layer, experts=experts.gpt_oss_experts, has_sinks=True, has_float_norms=True,
        quantizations=frozenset({experts.MXFP4}), defaults=experts.GPT_OSS_DEFAULTS,
        null_fields=_NULL_FIELDS | {"head_dim"},
        reads=frozenset({"attention_bias", "layer_types", "swiglu_alpha", "swiglu_limit"}),
    ),
    "DeepseekV2ForCausalLM": FamilySpec(
        has_latent=True, experts=experts.deepseek_v2_experts, defaults=LATENT_DEFAULTS | experts.V2_DEFAULTS,
        reads=_DEEPSEEK_READS | {"mlp_bias"},
    ),
    "DeepseekV3ForCausalLM": FamilySpec(
        has_latent=True, experts=experts.deepseek_v3_experts, defaults=LATENT_DEFAULTS | experts.V3_DEFAULTS,
        null_fields=_NULL_FIELDS | {"norm_topk_prob"},
        reads=_DEEPSEEK_READS | {"rope_interleave"},
    ),
}  # fmt: skip
"""Every supported architecture."""

ANSWER_FIELDS: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "query_pre_attn_scalar": (),
    "hidden_activation": (),
    "use_bidirectional_attention": (False,),
    "rope_interleave": (True,),
    "pretraining_tp": (1,),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
    "clip_qkv": (),
    "attention_chunk_size": (),
    "attn_temperature_tuning": (False,),
    "no_rope_layers": ([],),
    "embedding_multiplier": (1,),
    "attention_multiplier": (1,),
    "residual_multiplier": (1,),
    "logits_scaling": (1,),
    "logit_scale": (1,),
    "scale_emb": (1,),
    "norm_topk_prob": (True,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([],),
    "moe_layer_freq": (1,),
    "first_k_dense_replace": (0,),
    "n_shared_experts": (0,),
    "num_shared_experts": (0,),
    "shared_expert_intermediate_size": (0,),
    "scoring_func": ("softmax",),
    "topk_method": ("greedy",),
    "n_group": (1,),
    "topk_group": (1,),
    "routed_scaling_factor": (1,),
    "swiglu_alpha": (),
    "swiglu_limit": (),
}
"""Fields that change answers, and what each may be, besides absent, in a family that does not compute with it."""
