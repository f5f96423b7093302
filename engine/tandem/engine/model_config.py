"""Reads a Hugging Face `config.json` into one validated `ModelConfig`, whichever spelling it uses. Imports no torch.

A field that would change the answers and is not supported is refused by name, never ignored.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from tandem.core.errors import ModelError
from tandem.core.gguf.model_files import is_gguf
from tandem.core.kv_layout import DTYPE_BYTES
from tandem.engine.checkpoint_formats import READERS, StoredFormat, read_format
from tandem.engine.config_fields import Fields, read_fields
from tandem.engine.experts_config import ExpertsConfig, unused_layers
from tandem.engine.families import ANSWER_FIELDS, FAMILIES, FamilySpec, no_layer
from tandem.engine.gguf.config import read_gguf_fields
from tandem.engine.latent_config import LatentShape, read_latent
from tandem.engine.rope_config import RopeConfig, read_rope, read_ropes_by_layer_type

DTYPES = tuple(DTYPE_BYTES)
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
"""Names in config.json, and the decoder's activations that they mean."""

TP_SIZES = (1, 2, 3, 4, 8)
SPOKEN_SIZES = f"{', '.join(map(str, TP_SIZES[:-1]))} or {TP_SIZES[-1]}"


class KVShape(NamedTuple):
    """Cached data of a token in a layer, over all ranks. `is_replicated`: every rank has all of it."""

    planes: int
    heads: int
    width: int
    is_replicated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder. Sizes are of the whole model, not of one rank; `dtype` is the checkpoint's.

    A token of the layers `windowed_layers` attends to the last `window` tokens, itself among them; their rotation is
    `local_rope` where there is one. Scores are q·k / root of `query_scalar` (None: of `head_dim`). A cap c makes of a
    score or logit s c·tanh(s / c). `has_output_norms`: attention and MLP have a norm behind them, too. `intermediate`
    is of the dense MLPs; layers of `experts` have none. With a `latent`, attention has that shape: `head_dim` is
    then the part of a head that turns, and every head has keys and values. `stored`: how the checkpoint's matrices are
    packed, where they are. `unused_layers`: those behind the last one, which foretell more than one token; they are not
    loaded.
    """

    architecture: str
    vocab_size: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeConfig
    max_positions: int
    is_tied: bool
    has_qkv_bias: bool
    has_o_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    dtype: str
    eos_token_ids: tuple[int, ...]
    window: int | None = None
    windowed_layers: frozenset[int] = frozenset()
    local_rope: RopeConfig | None = None
    activation: str = "silu"
    has_unit_offset_norms: bool = False
    has_output_norms: bool = False
    embedding_scale: float = 1.0
    query_scalar: float | None = None
    attention_softcap: float | None = None
    final_softcap: float | None = None
    experts: ExpertsConfig | None = None
    has_sinks: bool = False
    has_float_norms: bool = False
    latent: LatentShape | None = None
    stored: StoredFormat | None = None
    unused_layers: int = 0

    @property
    def kv_shape(self) -> KVShape:
        if self.latent is not None:
            return KVShape(1, 1, self.latent.width, is_replicated=True)
        return KVShape(2, self.kv_heads, self.head_dim, is_replicated=False)

    @property
    def dense_layers(self) -> int:
        """Number of layers with an MLP instead of experts."""
        return self.layers if self.experts is None else self.layers - len(self.experts.layers)

    @property
    def attention_scale(self) -> float:
        """Factor of q·k."""
        if self.latent is not None:
            return self.latent.scale
        return float((self.query_scalar or self.head_dim) ** -0.5)

    def window_of(self, layer: int) -> int | None:
        """Tokens that a token of `layer` attends to; None for all before it."""
        return self.window if layer in self.windowed_layers else None

    def rope_of(self, layer: int) -> RopeConfig:
        return self.rope if self.local_rope is None or layer not in self.windowed_layers else self.local_rope

    def describe_rope(self) -> str:
        """One line for the fingerprint: equal exactly when the rotations of all layers are equal."""
        return self.rope.describe() + ("" if self.local_rope is None else f"|{self.local_rope.describe()}")

    def for_context(self, tokens: int) -> ModelConfig:
        """The same model for contexts of up to `tokens` tokens: rotations that depend on it are settled."""
        local = None if self.local_rope is None else self.local_rope.for_context(tokens, self.head_dim)
        return replace(self, rope=self.rope.for_context(tokens, self.head_dim), local_rope=local)

    @property
    def longest_context(self) -> int:
        """Tokens that the rotations allow; more than `max_positions` where they stretch."""
        return self.rope.longest_context(self.max_positions)


def read_model_config(model_dir: Path) -> ModelConfig:
    """The config of the model in `model_dir`, or of that GGUF file; raises ModelError naming file and wrong field."""
    raw = read_gguf_fields(model_dir) if is_gguf(model_dir) else read_fields(model_dir / "config.json")
    architecture, family = _family(raw)
    raw = family.with_defaults(raw)
    _refuse_unsupported(raw, architecture, family)
    heads, layers = raw.positive("num_attention_heads"), raw.positive("num_hidden_layers")
    hidden = raw.positive("hidden_size")
    has_bias = raw.flag("attention_bias", default=False)
    window, windowed_layers = _windows(raw, family, layers)
    rope, local_rope = read_ropes_by_layer_type(raw) if family.has_local_rope else (read_rope(raw), None)
    latent = read_latent(raw, heads) if family.has_latent else None
    config = ModelConfig(
        architecture=architecture,
        vocab_size=raw.positive("vocab_size"),
        hidden=hidden,
        intermediate=raw.positive("intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=raw.positive("num_key_value_heads", default=heads),
        head_dim=latent.turned if latent else raw.positive("head_dim", default=hidden // heads),
        norm_eps=raw.number("rms_norm_eps", default=1e-6),
        rope=rope,
        max_positions=raw.positive("max_position_embeddings"),
        is_tied=raw.flag("tie_word_embeddings", default=False),
        has_qkv_bias=has_bias if family.qkv_bias is None else family.qkv_bias,
        has_o_bias=has_bias if family.qkv_bias is None else False,
        has_mlp_bias=raw.flag("mlp_bias", default=False),
        has_qk_norm=family.has_qk_norm,
        dtype=_dtype(raw),
        eos_token_ids=_eos_token_ids(raw, model_dir, raw.positive("vocab_size")),
        window=window,
        windowed_layers=windowed_layers,
        local_rope=local_rope,
        activation=_activation(raw, family),
        has_unit_offset_norms=family.has_unit_offset_norms,
        has_output_norms=family.has_output_norms,
        embedding_scale=hidden**0.5 if family.scales_embedding else 1.0,
        query_scalar=raw.optional("query_pre_attn_scalar"),
        attention_softcap=raw.optional("attn_logit_softcapping"),
        final_softcap=raw.optional("final_logit_softcapping"),
        experts=None if family.experts is None else family.experts(raw, layers),
        has_sinks=family.has_sinks,
        has_float_norms=family.has_float_norms,
        latent=latent,
        stored=read_format(raw),
        unused_layers=unused_layers(raw) if latent else 0,
    )
    _check_shape(raw, config)
    return config


def tp_refusal(config: ModelConfig, tp: int) -> str:
    """Return why the model cannot be split over `tp` ranks; "" if it can. The vocabulary always fits: it is padded."""
    if tp not in TP_SIZES:
        return f"a worker has {SPOKEN_SIZES} ranks"
    if config.heads % tp:
        return f"its {config.heads} query heads cannot be split evenly over {tp} ranks"
    if config.kv_heads % tp and tp % config.kv_heads:
        return f"its {config.kv_heads} KV heads can neither be split nor repeated evenly over {tp} ranks"
    if config.dense_layers and config.intermediate % tp:
        return f"its {config.intermediate} intermediate features cannot be split evenly over {tp} ranks"
    if config.experts is not None and config.experts.intermediate % tp:
        return f"its experts' {config.experts.intermediate} features cannot be split evenly over {tp} ranks"
    if config.experts is not None and config.experts.shared % tp:
        return f"its shared experts' {config.experts.shared} features cannot be split evenly over {tp} ranks"
    return ""


def fitting_tp(config: ModelConfig) -> tuple[int, ...]:
    """The TP sizes that fit the model, smallest first; 1 always does."""
    return tuple(tp for tp in TP_SIZES if not tp_refusal(config, tp))


def check_tp(config: ModelConfig, tp: int) -> None:
    """Raise ModelError, with the sizes that fit, unless the model can be split over `tp` ranks."""
    why = tp_refusal(config, tp)
    if why:
        fits = ", ".join(str(size) for size in fitting_tp(config))
        raise ModelError(f"--tp {tp} does not fit the model ({config.architecture})", why=why, todo=f"use --tp {fits}")


def _family(raw: Fields) -> tuple[str, FamilySpec]:
    named = raw.get("architectures")
    architecture = named[0] if isinstance(named, list) and named and isinstance(named[0], str) else None
    if architecture in FAMILIES:
        return architecture, FAMILIES[architecture]
    known = f"Tandem computes {', '.join(FAMILIES)}"
    if architecture is None:
        raise raw.error(
            "architectures is missing" if named in (None, []) else f"architectures is {named!r}",
            why="it names the graph to be computed, in a list",
            todo=f"use the model's complete config.json; {known}",
        )
    raise raw.error(
        f"unsupported architecture {architecture}",
        why=known,
        todo="serve a model of one of these, or add a line to FAMILIES where the graph is the same",
    )


def _refuse_unsupported(raw: Fields, architecture: str, family: FamilySpec) -> None:
    quantization = raw.get("quantization_config")
    method = str(quantization.get("quant_method") if isinstance(quantization, dict) else quantization)
    if quantization and method not in family.quantizations and method not in READERS:
        raise raw.error(
            f"quantized weights ({method}) are not supported",
            why=f"quantization_config is set; formats that are read: {', '.join(READERS)}",
            todo="use one of these, or plain weights",
        )
    for name, neutral in ANSWER_FIELDS.items():
        value = raw.get(name)
        if name not in family.reads and value is not None and value not in neutral:
            raise raw.error(f"{name} {value} is not supported", why=f"{architecture} is computed without it")


def _activation(raw: Fields, family: FamilySpec) -> str:
    name = "hidden_activation" if "hidden_activation" in family.reads else "hidden_act"
    value = raw.get(name) or "silu"
    if value not in ACTIVATIONS:
        raise raw.error(f"{name} {value} is not supported", why=f"the decoder computes {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[value]


def _windows(raw: Fields, family: FamilySpec, layers: int) -> tuple[int | None, frozenset[int]]:
    """Return the sliding window and its layers: by `layer_types`, else by the family's rule."""
    is_on = not family.has_window_switch or raw.flag("use_sliding_window", default=False)
    window = None
    if is_on and family.windowed is not no_layer and raw.get("sliding_window") is not None:
        window = raw.positive("sliding_window")
    windowed = frozenset(family.windowed(raw, layers) if window is not None else ())
    kinds = raw.get("layer_types")
    if kinds is None:
        return (window, windowed) if windowed else (None, windowed)
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise raw.error(f"layer_types is {kinds!r}", why=f"it must be a list of {layers} kinds")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise raw.error(f"layer type {kind} is not supported", why="layer_types names it")
    listed = frozenset(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")
    if listed and window is None:
        raise raw.error("layer type sliding_attention needs a window", why="sliding_window is not set or switched off")
    if listed != windowed and "layer_types" not in family.reads:
        raise raw.error("layer_types is not supported", why="all layers of this family are of one type")
    return (window, listed) if listed else (None, listed)


def _dtype(raw: Fields) -> str:
    named = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if named not in DTYPES:
        raise raw.error(f"dtype {named!r} is not supported", why=f"weights must be one of {', '.join(DTYPES)}")
    return str(named)


def _eos_token_ids(raw: Fields, model_dir: Path, vocab_size: int) -> tuple[int, ...]:
    """Ids that end an answer, from config.json and generation_config.json together, in order, without doubles.

    Ids beyond the vocabulary, which models that were shrunk keep, can never come and are left out.
    """
    sources = [raw]
    generation = model_dir / "generation_config.json"
    if generation.exists():
        sources.insert(0, read_fields(generation))
    ids: dict[int, None] = {}
    for fields in sources:
        value = fields.get("eos_token_id")
        listed = value if isinstance(value, list) else [] if value is None else [value]
        for token in listed:
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise fields.error(f"eos_token_id is {value!r}", why="it must be a token id or a list of them")
            ids[token] = None
    return tuple(token for token in ids if token < vocab_size)


def _check_shape(raw: Fields, config: ModelConfig) -> None:
    if config.heads % config.kv_heads:
        raise raw.error(f"{config.heads} query heads over {config.kv_heads} KV heads", why="they must divide evenly")
    if config.head_dim % 2:
        raise raw.error(f"head_dim is {config.head_dim}", why="rotary positions need an even size")
