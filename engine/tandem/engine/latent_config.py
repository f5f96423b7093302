"""The shape of multi-head latent attention (DeepSeek-V2, Liu et al. 2024, section 2.1) in a `config.json`. Imports no
torch.

    hidden ─┬─ [latent | shared key]   cached: one row of `width` numbers a token and layer, the same for all heads
            └─ queries, or `query_rank` numbers that the queries are made of
    latent ─── heads × [key of `plain` | value of `value`]
    query = key = [`plain` | `turned`]: the first part knows no position, the second one is rotated
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tandem.engine.config_fields import Fields

NORM_EPS = 1e-6
"""Epsilon of the norms inside the attention, whatever `rms_norm_eps` is, as in transformers."""
DEFAULTS = {
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
"""transformers' defaults for absent fields; null differs from absent: no `q_lora_rank` at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape:
    """Widths of the parts above. `is_interleaved`: pairs that turn together are neighbours in the checkpoint.

    `gain` is a factor of the scores beside the root of the query's width: squared mscale of yarn.
    """

    query_rank: int | None
    rank: int
    plain: int
    turned: int
    value: int
    is_interleaved: bool
    gain: float = 1.0

    @property
    def width(self) -> int:
        """Numbers that are cached of a token in a layer."""
        return self.rank + self.turned

    @property
    def query(self) -> int:
        """Numbers of a head's query."""
        return self.plain + self.turned

    @property
    def scale(self) -> float:
        """Factor of q·k."""
        return float(self.query**-0.5) * self.gain

    def before(self, hidden: int, heads: int) -> int:
        """Numbers of the matrices that a token passes before attention, in a layer."""
        queries = hidden if self.query_rank is None else self.query_rank
        down = hidden * (self.width + (self.query_rank or 0))
        return down + queries * heads * self.query + heads * self.plain * self.rank

    def behind(self, hidden: int, heads: int) -> int:
        """The same behind attention."""
        return heads * self.value * (self.rank + hidden)

    def token_numbers(self, heads: int) -> int:
        """Numbers that are in memory of one token between the first product and the last, at most: queries as they are
        made, in the latent space and beside what turns; the row to cache; answers, as they come and out of it."""
        before = 2 * (self.query_rank or 0) + 3 * self.width + heads * (self.query + 4 * self.turned)
        return before + heads * (2 * self.rank + 3 * self.width + self.value)


def read_latent(raw: Fields, heads: int) -> LatentShape:
    """Raises ModelError with the field that is wrong or not supported."""
    if raw.positive("num_key_value_heads", default=heads) != heads:
        raise raw.error(
            f"num_key_value_heads is {raw.get('num_key_value_heads')}", why=f"latent attention has {heads}, one a head"
        )
    return LatentShape(
        query_rank=None if raw.get("q_lora_rank") is None else raw.positive("q_lora_rank"),
        rank=raw.positive("kv_lora_rank"),
        plain=raw.positive("qk_nope_head_dim"),
        turned=raw.positive("qk_rope_head_dim"),
        value=raw.positive("v_head_dim"),
        is_interleaved=raw.flag("rope_interleave", default=True),
        gain=_gain(raw),
    )


def _gain(raw: Fields) -> float:
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(scaling, dict) or (scaling.get("rope_type") or scaling.get("type") or "default") == "default":
        return 1.0
    fields = Fields(scaling, raw.path)
    scale = fields.optional("mscale_all_dim")
    if scale is None:
        return 1.0
    factor = fields.number("factor")
    return 1.0 if factor <= 1 else (0.1 * scale * math.log(factor) + 1.0) ** 2
