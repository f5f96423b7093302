"""Reads a Hugging Face `config.json` into one validated `ModelConfig`, whichever spelling it uses. Imports no torch.

A field that would change the answers and is not supported is refused by name, never ignored.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.core.errors import ModelError
from tandem.core.kvlayout import DTYPE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilySpec:
    """How one architecture differs from plain Llama. `qkv_bias` None: the config's `attention_bias` decides."""

    qkv_bias: bool | None = None
    has_qk_norm: bool = False
    default_rope_theta: float = 10000.0


FAMILIES: dict[str, FamilySpec] = {
    "LlamaForCausalLM": FamilySpec(),
    "Qwen2ForCausalLM": FamilySpec(qkv_bias=True),
    "Qwen3ForCausalLM": FamilySpec(has_qk_norm=True),
}
"""Every architecture that `models/decoder.py` computes; a new dense family is one more line."""

DTYPES = tuple(DTYPE_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary positions. `kind` is default, linear or llama3; the other fields are those of that kind.

    linear: positions are divided by `factor`. llama3: low frequencies are (Llama 3.1, as in transformers).
    """

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192

    def describe(self) -> str:
        """One line for the fingerprint: equal exactly when the rotations are equal."""
        text = f"{self.kind}:{self.theta!r}"
        if self.kind != "default":
            text += f":{self.factor!r}"
        if self.kind == "llama3":
            text += f":{self.low_freq_factor!r}:{self.high_freq_factor!r}:{self.original_max_positions}"
        return text


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a dense decoder. Sizes are of the whole model, not of one rank; `dtype` is the checkpoint's."""

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


def read_model_config(model_dir: Path) -> ModelConfig:
    """The config of the model in `model_dir`; raises ModelError naming the file and the field that is wrong."""
    raw = _Fields(_read_json(model_dir / "config.json"), model_dir / "config.json")
    architecture, family = _family(raw)
    _refuse_unsupported(raw)
    heads = raw.positive("num_attention_heads")
    hidden = raw.positive("hidden_size")
    has_bias = raw.flag("attention_bias", default=False)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=raw.positive("vocab_size"),
        hidden=hidden,
        intermediate=raw.positive("intermediate_size"),
        layers=raw.positive("num_hidden_layers"),
        heads=heads,
        kv_heads=raw.positive("num_key_value_heads", default=heads),
        head_dim=raw.positive("head_dim", default=hidden // heads),
        norm_eps=raw.number("rms_norm_eps", default=1e-6),
        rope=_rope(raw, family),
        max_positions=raw.positive("max_position_embeddings"),
        is_tied=raw.flag("tie_word_embeddings", default=False),
        has_qkv_bias=has_bias if family.qkv_bias is None else family.qkv_bias,
        has_o_bias=has_bias if family.qkv_bias is None else False,
        has_mlp_bias=raw.flag("mlp_bias", default=False),
        has_qk_norm=family.has_qk_norm,
        dtype=_dtype(raw),
        eos_token_ids=_eos_token_ids(raw, model_dir, raw.positive("vocab_size")),
    )
    _check_shape(raw, config)
    return config


class _Fields:
    """Typed access to a parsed config; every complaint names the file and the field."""

    def __init__(self, values: dict[str, Any], path: Path) -> None:
        self.values, self.path = values, path

    def error(self, what: str, why: str = "", todo: str = "") -> ModelError:
        return ModelError(f"{self.path}: {what}", why=why, todo=todo)

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def number(self, name: str, *, default: float | None = None) -> float:
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            raise self.error(f"{name} is missing", todo="use a complete Hugging Face config.json")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.error(f"{name} is {value!r}", why="it must be a number above 0")
        return float(value)

    def positive(self, name: str, *, default: int | None = None) -> int:
        value = self.number(name, default=default)
        if value != int(value):
            raise self.error(f"{name} is {value!r}", why="it must be a whole number")
        return int(value)

    def flag(self, name: str, *, default: bool) -> bool:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(f"{name} is {value!r}", why="it must be true or false")
        return value


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(
            f"{path} does not exist", why="every model has one", todo="give a folder in Hugging Face format"
        ) from error
    except OSError as error:
        raise ModelError(f"cannot read {path}", why=str(error)) from error
    except ValueError as error:
        raise ModelError(f"{path} is not JSON", why=str(error), todo="download the model again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object", todo="download the model again")
    return value


def _family(raw: _Fields) -> tuple[str, FamilySpec]:
    named = raw.get("architectures")
    architecture = named[0] if isinstance(named, list) and named and isinstance(named[0], str) else None
    if architecture in FAMILIES:
        return architecture, FAMILIES[architecture]
    raise raw.error(
        f"unsupported architecture {architecture or 'none named'}",
        why=f"Tandem computes {', '.join(FAMILIES)}",
        todo="serve a model of one of these, or add a line to FAMILIES where the graph is the same",
    )


def _refuse_unsupported(raw: _Fields) -> None:
    if raw.get("quantization_config"):
        raise raw.error(
            "quantized weights are not supported", why="quantization_config is set", todo="use plain weights"
        )
    if raw.flag("use_sliding_window", default=False) and raw.get("sliding_window") is not None:
        raise raw.error(
            "sliding-window attention is not supported",
            why="use_sliding_window is true",
            todo="serve a model without it",
        )
    kinds = raw.get("layer_types")
    if isinstance(kinds, list) and any(kind != "full_attention" for kind in kinds):
        odd = next(kind for kind in kinds if kind != "full_attention")
        raise raw.error(f"layer type {odd} is not supported", why="layer_types has more than full_attention")
    activation = raw.get("hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        raise raw.error(f"hidden_act {activation} is not supported", why="the decoder computes silu")
    if raw.get("pretraining_tp") not in (None, 1):
        raise raw.error("pretraining_tp above 1 is not supported", why="its sliced matmuls are not computed here")


def _rope(raw: _Fields, family: FamilySpec) -> RopeConfig:
    """`rope_parameters` (new) holds everything; of old, `rope_theta` stood alone beside `rope_scaling`."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(scaling, dict) or any(isinstance(v, dict) for v in scaling.values()):
        raise raw.error("rope parameters for each layer type are not supported")
    fields = _Fields(scaling, raw.path)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ("default", "linear", "llama3"):
        raise raw.error(
            f"rope type {kind} is not supported", why="Tandem computes default, linear and llama3",
            todo="serve a model with one of these",
        )  # fmt: skip
    for partial in (raw.get("partial_rotary_factor"), scaling.get("partial_rotary_factor")):
        if partial not in (None, 1, 1.0):
            raise raw.error(f"partial_rotary_factor {partial} is not supported", why="whole heads are rotated")
    outer = raw.number("rope_theta", default=family.default_rope_theta)
    theta = fields.number("rope_theta", default=outer)
    if kind == "default":
        return RopeConfig(theta=theta)
    factor = fields.number("factor")
    if kind == "linear":
        return RopeConfig(kind="linear", theta=theta, factor=factor)
    return RopeConfig(
        kind="llama3", theta=theta, factor=factor,
        low_freq_factor=fields.number("low_freq_factor"), high_freq_factor=fields.number("high_freq_factor"),
        original_max_positions=fields.positive("original_max_position_embeddings"),
    )  # fmt: skip


def _dtype(raw: _Fields) -> str:
    named = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if named not in DTYPES:
        raise raw.error(f"dtype {named!r} is not supported", why=f"weights must be one of {', '.join(DTYPES)}")
    return str(named)


def _eos_token_ids(raw: _Fields, model_dir: Path, vocab_size: int) -> tuple[int, ...]:
    """Ids that end an answer, from config.json and generation_config.json together, in order, without doubles.

    Ids beyond the vocabulary, which models that were shrunk keep, can never come and are left out.
    """
    sources = [raw]
    generation = model_dir / "generation_config.json"
    if generation.exists():
        sources.insert(0, _Fields(_read_json(generation), generation))
    ids: dict[int, None] = {}
    for fields in sources:
        value = fields.get("eos_token_id")
        listed = value if isinstance(value, list) else [] if value is None else [value]
        for token in listed:
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise fields.error(f"eos_token_id is {value!r}", why="it must be a token id or a list of them")
            ids[token] = None
    return tuple(token for token in ids if token < vocab_size)


def _check_shape(raw: _Fields, config: ModelConfig) -> None:
    if config.heads % config.kv_heads:
        raise raw.error(f"{config.heads} query heads over {config.kv_heads} KV heads", why="they must divide evenly")
    if config.head_dim % 2:
        raise raw.error(f"head_dim is {config.head_dim}", why="rotary positions need an even size")
