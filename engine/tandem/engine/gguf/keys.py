"""Metadata of a file's architecture, by keys without its name: typed, bounded, and none is ignored. No torch."""

from __future__ import annotations

from typing import Any

from tandem.core.errors import ModelError
from tandem.core.gguf.metadata import Metadata

_MOST = (1 << 31) - 1
MAX_EXPERTS = 1 << 12
"""Of a layer; each has parameters of its own before the file is read."""
COMMON = frozenset({
    "vocab_size", "context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon",
    "attention.causal", "rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.attn_factor", "rope.scaling.finetuned", "rope.scale_linear",
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
})  # fmt: skip
"""Keys of all families."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,), "expert_used_count": (0,), "attention.sliding_window": (0,), "expert_shared_count": (0,),
    "tensor_data_layout": ("Meta AI original pth", ""), "pooling_type": (0,), "logit_scale": (1.0,),
    "residual_scale": (1.0,), "embedding_scale": (1.0,),
}  # fmt: skip
"""Allowed values of a key in a family that does not read it."""


class MetadataReader:
    """Of `metadata`. All readers raise ModelError with file and key."""

    def __init__(self, metadata: Metadata) -> None:
        self.metadata = metadata
        self.architecture = metadata.text("general.architecture")

    def error(self, name: str, why: str) -> ModelError:
        return self.metadata.error(self._key(name), why, "serve another model, or this one's safetensors")

    def positive(self, name: str, default: int | None = None) -> int:
        """A whole number above 0, the same one for each layer where there is an array."""
        key = self._key(name)
        if self.metadata.is_array(key):
            values = self.metadata.wholes(key)
            if len(set(values)) != 1:
                raise self.error(name, f"it is {values[:4]}, and layers of different shapes are not computed")
            value: int | None = values[0]
        else:
            value = self.metadata.whole(key, default)
        if value is None:
            raise self.error(name, "it is missing")
        if not 1 <= value <= _MOST:
            raise self.error(name, f"it is {value}, and must be 1 to {_MOST}")
        return value

    def count(self, name: str) -> int:
        """A whole number, 0 where it is absent."""
        value = self.metadata.whole(self._key(name), 0) or 0
        if not 0 <= value <= _MOST:
            raise self.error(name, f"it is {value}, and must be 0 to {_MOST}")
        return value

    def flag(self, name: str) -> bool:
        """False where it is absent."""
        return self.metadata.flag(self._key(name), False)

    def has(self, name: str) -> bool:
        return self._key(name) in self.metadata

    def experts(self) -> int:
        """How many a layer has."""
        count = self.positive("expert_count")
        if count > MAX_EXPERTS:
            raise self.error("expert_count", f"it is {count}, and at most {MAX_EXPERTS} are computed")
        return count

    def number(self, name: str, default: float | None = None) -> float | None:
        """A number above 0, or None where it is absent and has no default."""
        value = self.metadata.number(self._key(name), default)
        if value is not None and not 0 < value < float("inf"):
            raise self.error(name, f"it is {value}, and must be above 0")
        return value

    def rope(self, theta: float = 1e4) -> dict[str, Any]:
        """The rotation as `rope_parameters` of config.json; `theta` where the file names none."""
        found: dict[str, Any] = {"rope_theta": self.number("rope.freq_base", theta)}
        kind = self.metadata.text(self._key("rope.scaling.type"), "none")
        factor = self.number("rope.scaling.factor") or self.number("rope.scale_linear")
        if kind == "none":
            kind = "linear" if factor not in (None, 1.0) else "default"
        if kind == "default":
            return found
        if kind not in ("linear", "yarn") or factor is None:
            raise self.error("rope.scaling.type", f"it is {kind[:64]!r} with factor {factor}")
        found |= {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            found["original_max_position_embeddings"] = self.positive("rope.scaling.original_context_length")
            for ours, name in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
                if (value := self.number(f"rope.scaling.{name}")) is not None:
                    found[ours] = value
        if self.number("rope.scaling.attn_factor", 1.0) != 1.0:
            raise self.error("rope.scaling.attn_factor", "it is not 1")
        return found

    def check(self, reads: frozenset[str]) -> None:
        """Raise ModelError for a key that changes answers and is neither among `reads` nor `COMMON`."""
        prefix = f"{self.architecture}."
        for key in self.metadata.keys():  # noqa: SIM118 - no mapping
            name = key.removeprefix(prefix)
            if not key.startswith(prefix) or name in COMMON or name in reads:
                continue
            if name not in _NEUTRAL or self._plain(key) not in _NEUTRAL[name]:
                raise self.error(name, f"{self.architecture} is computed without it")
        if not self.metadata.flag(self._key("attention.causal"), True):
            raise self.error("attention.causal", "tokens that see those to come are not computed")

    def _plain(self, key: str) -> object:
        """A value that is not an array; None for one that is."""
        if self.metadata.is_array(key):
            return None
        try:
            return self.metadata.number(key)
        except ModelError:
            return self.metadata.text(key)

    def _key(self, name: str) -> str:
        return f"{self.architecture}.{name}"
