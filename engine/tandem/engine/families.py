"""The families that are computed: one row an architecture, saying how it differs from plain Llama. Imports no torch.

A dense family is a row here, computed by `models/decoder.py`. Only a new forward graph is a new file in `models`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tandem.engine.config_fields import Fields


def no_layer(_raw: Fields, _layers: int) -> Iterable[int]:
    return ()


def every_layer(_raw: Fields, layers: int) -> Iterable[int]:
    return range(layers)


def late_layers(raw: Fields, layers: int) -> Iterable[int]:
    """Qwen: the layers from `max_window_layers` on."""
    first = raw.get("max_window_layers")
    return range(0 if first == 0 else raw.positive("max_window_layers"), layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilySpec:
    """How one architecture differs from plain Llama.

    `qkv_bias` None: the config's `attention_bias` decides. `windowed` says which layers the sliding window is of, where
    the config has one and its `layer_types` do not say so. `has_window_switch`: only if `use_sliding_window` is true.
    `defaults` are what transformers takes for fields that config.json leaves out; `reads` names fields that change
    answers and that this family computes with (see `ANSWER_FIELDS`), and `layer_types` where layers may be of two.
    """

    qkv_bias: bool | None = None
    has_qk_norm: bool = False
    windowed: Callable[[Fields, int], Iterable[int]] = no_layer
    has_window_switch: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    reads: frozenset[str] = frozenset()


_QWEN_WINDOW: dict[str, Any] = {"sliding_window": 4096, "max_window_layers": 28}

FAMILIES: dict[str, FamilySpec] = {
    "LlamaForCausalLM": FamilySpec(reads=frozenset({"attention_bias", "mlp_bias"})),
    "MistralForCausalLM": FamilySpec(qkv_bias=False, windowed=every_layer, defaults={"sliding_window": 4096}),
    "Qwen2ForCausalLM": FamilySpec(
        qkv_bias=True, windowed=late_layers, has_window_switch=True, defaults=_QWEN_WINDOW,
        reads=frozenset({"attention_bias", "layer_types", "use_sliding_window"}),
    ),
    "Qwen3ForCausalLM": FamilySpec(
        has_qk_norm=True, windowed=late_layers, has_window_switch=True, defaults=_QWEN_WINDOW | {"head_dim": 128},
        reads=frozenset({"attention_bias", "layer_types", "use_sliding_window"}),
    ),
}  # fmt: skip
"""Every architecture that is computed."""

ANSWER_FIELDS: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "query_pre_attn_scalar": (),
    "hidden_activation": (),
    "use_bidirectional_attention": (False,),
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
}
"""Fields that change answers, and what each may be, besides absent, in a family that does not compute with it."""
