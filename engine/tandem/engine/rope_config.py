"""Reads the rotary positions of a `config.json`, in either spelling. Imports no torch.

    new   "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    old   "rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 2.0}

Gemma 3 has one rotation for each type of layer:

    new   "rope_parameters": {"full_attention": {…}, "sliding_attention": {…}}
    old   "rope_theta", "rope_scaling" for full attention, "rope_local_base_freq" for sliding attention
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tandem.engine.config_fields import Fields

KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_KNOWN = _COMMON | {
    "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow",
    "attention_factor", "mscale", "mscale_all_dim", "truncate",
}  # fmt: skip
"""Fields that some kind reads. A kind ignores those of the others, as transformers does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary positions. `kind` is one of `KINDS`; the fields behind `theta` are those of the kinds that name them.

    linear: positions are divided by `factor`. llama3: low frequencies are (Llama 3.1, as in transformers). dynamic:
    `theta` grows with the context beyond `original_max_positions` (NTK). yarn: frequencies that turn less than
    `beta_slow` times within `original_max_positions` are divided by `factor`, those above `beta_fast` kept; cosines and
    sines are multiplied by `attention_factor` (Peng et al. 2023, section 3).
    """

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    is_truncated: bool = True

    def describe(self) -> str:
        """One line for the fingerprint: equal exactly when the rotations are equal."""
        text = f"{self.kind}:{self.theta!r}"
        if self.kind != "default":
            text += f":{self.factor!r}"
        if self.kind == "dynamic":
            text += f":{self.original_max_positions}"
        if self.kind == "llama3":
            text += f":{self.low_freq_factor!r}:{self.high_freq_factor!r}:{self.original_max_positions}"
        if self.kind == "yarn":
            text += f":{self.beta_fast!r}:{self.beta_slow!r}:{self.original_max_positions}"
            text += f":{self.attention_factor!r}:{self.is_truncated}"
        return text

    def for_context(self, tokens: int, head_dim: int) -> RopeConfig:
        """The same rotations for contexts of up to `tokens` tokens: dynamic becomes default with that length's theta.

        transformers takes the length of each call for it and leaves cached keys as they were; here keys are stored
        turned and shared, so one theta holds for all of them.
        """
        if self.kind != "dynamic":
            return self
        growth = max(1.0, self.factor * tokens / self.original_max_positions - (self.factor - 1))
        return RopeConfig(theta=self.theta * growth ** (head_dim / (head_dim - 2)))

    def longest_context(self, max_positions: int) -> int:
        """Tokens for which the rotations are made, of a model that states `max_positions`."""
        if self.kind not in ("dynamic", "yarn"):
            return max_positions
        return max(max_positions, int(self.original_max_positions * self.factor))


def read_rope(raw: Fields) -> RopeConfig:
    """The one rotation of all layers. Raises ModelError with the field that is wrong or not supported."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(scaling, dict) or any(isinstance(value, dict) for value in scaling.values()):
        raise raw.error("rope parameters for each layer type are not supported", why="this family has one for all")
    return _rope(raw, scaling, raw.number("rope_theta", default=10000.0))


def read_ropes_by_layer_type(raw: Fields) -> tuple[RopeConfig, RopeConfig]:
    """The rotations of layers with full and with sliding attention. Raises ModelError as `read_rope` does."""
    theta, local_theta = raw.number("rope_theta", default=1e6), raw.number("rope_local_base_freq", default=1e4)
    nested = raw.get("rope_parameters")
    if nested is None:
        nested = {"full_attention": raw.get("rope_scaling")}
    if not isinstance(nested, dict) or set(nested) - {"full_attention", "sliding_attention"}:
        raise raw.error(f"rope_parameters is {nested!r}", why="it must name full_attention and sliding_attention")
    whole, local = nested.get("full_attention") or {}, nested.get("sliding_attention") or {}
    if not isinstance(whole, dict) or not isinstance(local, dict):
        raise raw.error(f"rope_parameters is {nested!r}", why="each type of layer needs an object")
    return _rope(raw, whole, theta), _rope(raw, local, local_theta)


def _rope(raw: Fields, scaling: dict[str, object], theta: float) -> RopeConfig:
    """The rotation of `scaling`; `theta` where it names none."""
    fields = Fields(scaling, raw.path)
    named = scaling.get("rope_type") or scaling.get("type")
    kind = named or "default"
    read = sorted(name for name, value in scaling.items() if name not in _COMMON and value is not None)
    if not named and read:  # to pass over it would serve another model than was trained
        raise raw.error(
            f"the rotary positions have {read[0]} and no rope_type", why="which type it belongs to cannot be told",
            todo=f"add rope_type to rope_scaling: one of {', '.join(KINDS)}",
        )  # fmt: skip
    if kind not in KINDS:
        raise raw.error(
            f"rope type {kind} is not supported", why=f"Tandem computes {', '.join(KINDS)}",
            todo="serve a model with one of these",
        )  # fmt: skip
    for unknown in sorted(set(scaling) - _KNOWN):
        raise raw.error(f"rope parameter {unknown} is not supported", why=f"rope type {kind} is computed without it")
    for partial in (raw.get("partial_rotary_factor"), scaling.get("partial_rotary_factor")):
        if partial not in (None, 1, 1.0):
            raise raw.error(f"partial_rotary_factor {partial} is not supported", why="whole heads are rotated")
    rope = RopeConfig(theta=fields.number("rope_theta", default=theta))
    if kind == "default":
        return rope
    positions = raw.positive("max_position_embeddings")
    if kind == "dynamic":
        return replace(rope, kind="dynamic", factor=fields.number("factor"), original_max_positions=positions)
    if kind == "linear":
        return replace(rope, kind="linear", factor=fields.number("factor"))
    outer = raw.positive("original_max_position_embeddings", default=positions)
    original = fields.positive("original_max_position_embeddings", default=outer)
    if kind == "yarn":
        return _yarn(fields, replace(rope, kind="yarn", original_max_positions=original), positions)
    return replace(
        rope, kind="llama3", factor=fields.number("factor"), original_max_positions=original,
        low_freq_factor=fields.number("low_freq_factor"), high_freq_factor=fields.number("high_freq_factor"),
    )  # fmt: skip


def _yarn(fields: Fields, rope: RopeConfig, positions: int) -> RopeConfig:
    factor = fields.number("factor", default=positions / rope.original_max_positions)
    scale, all_dim = fields.optional("mscale"), fields.optional("mscale_all_dim")
    attention = _attention_factor(factor, 1.0)
    if scale is not None and all_dim is not None:
        attention = _attention_factor(factor, scale) / _attention_factor(factor, all_dim)
    return replace(
        rope, factor=factor, beta_fast=fields.number("beta_fast", default=32.0),
        beta_slow=fields.number("beta_slow", default=1.0), is_truncated=fields.flag("truncate", default=True),
        attention_factor=fields.number("attention_factor", default=attention),
    )  # fmt: skip


def _attention_factor(factor: float, scale: float) -> float:
    """Factor by which attention has to be sharper over a context that is `factor` times as long."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
