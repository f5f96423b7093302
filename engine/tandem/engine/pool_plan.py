"""Plans a worker's KV: its groups, the blocks that a byte budget buys, the longest context.

Pure arithmetic over a model's config; imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from tandem.core.errors import ConfigError, ModelError, StartupError
from tandem.core.ids import GroupId
from tandem.core.kv_layout import KVGroupSpec, KVLayout
from tandem.engine.model_config import ModelConfig


def kv_layout(config: ModelConfig, *, dtype: str, block_tokens: int, tp: int = 1, has_windows: bool = True) -> KVLayout:
    """The KV groups of a model: one, for all layers have one shape. It has a window where every layer has; where only
    some have, or without `has_windows`, KV of the whole context is kept."""
    shape = config.kv_shape
    is_windowed = has_windows and len(config.windowed_layers) == config.layers
    group = KVGroupSpec(
        group=GroupId(0), layers=tuple(range(config.layers)), planes=shape.planes, heads=shape.heads,
        width=shape.width, block_tokens=block_tokens, dtype=dtype, is_replicated=shape.is_replicated,
        window=config.window if is_windowed else None,
    )  # fmt: skip
    return KVLayout(groups=(group,), tp=tp)


def block_counts(layout: KVLayout, kv_bytes: int | None, num_blocks: int | None, max_model_len: int) -> tuple[int, ...]:
    """Blocks of each group's pool, from exactly one of a byte budget and a count (ConfigError otherwise)."""
    if (kv_bytes is None) == (num_blocks is None):
        raise ConfigError("exactly one of kv_bytes and num_blocks must be set", todo="give --kv-memory")
    if kv_bytes is not None:
        return plan_blocks(layout, kv_bytes, max_model_len)
    counts = (num_blocks or 0,) * len(layout.groups)
    check_blocks(layout, counts, max_model_len)
    return counts


def context_length(wanted: int, config: ModelConfig) -> int:
    """Tokens of the longest context: `wanted`, 0 = what the model allows. Raises ConfigError or ModelError."""
    if wanted < 0:
        raise ConfigError(f"max_model_len is {wanted}", todo="use 0 for the model's own limit")
    longest = config.longest_context
    if wanted > longest:
        raise ModelError(
            f"max_model_len {wanted} is beyond the model", why=f"it has {longest} positions",
            todo=f"use {longest} or less",
        )  # fmt: skip
    return wanted or config.max_positions


def plan_blocks(layout: KVLayout, budget_bytes: int, max_model_len: int) -> tuple[int, ...]:
    """Blocks of each group that fit `budget_bytes` on this rank; every group covers the same number of tokens.

    Raises StartupError if the budget cannot hold one sequence of `max_model_len` tokens.
    """
    per_token = sum(Fraction(group.block_bytes(layout.tp), group.block_tokens) for group in layout.groups)
    tokens = int(budget_bytes / per_token)
    counts = tuple(tokens // group.block_tokens for group in layout.groups)
    check_blocks(layout, counts, max_model_len)
    return counts


def check_blocks(layout: KVLayout, num_blocks: Sequence[int], max_model_len: int) -> None:
    """Raise StartupError if `num_blocks` (one number a group) cannot hold one sequence of `max_model_len` tokens.

    Windows count whole: a request is admitted with blocks for all tokens that it has.
    """
    if len(num_blocks) != len(layout.groups):
        raise ValueError(f"{len(num_blocks)} block counts for {len(layout.groups)} KV groups")
    needed = [group.blocks_for(max_model_len) for group in layout.groups]
    if all(have >= need for have, need in zip(num_blocks, needed, strict=True)):
        return
    per_token = sum(Fraction(group.block_bytes(layout.tp), group.block_tokens) for group in layout.groups)
    tokens = max(need * group.block_tokens for need, group in zip(needed, layout.groups, strict=True))
    fits = kv_tokens(layout, num_blocks)
    raise StartupError(
        f"KV memory is too small for one sequence of {max_model_len} tokens",
        why=f"it holds {fits} tokens",
        todo=f"give --kv-memory {human_size(int(tokens * per_token) + 1)} or more, or lower --max-model-len",
    )


def kv_words(layout: KVLayout, num_blocks: Sequence[int], max_model_len: int) -> str:
    """Text for people, such as "KV of 104,848 tokens, 25.6 full contexts of 4,096"."""
    tokens = kv_tokens(layout, num_blocks)
    return f"KV of {tokens:,} tokens, {tokens / max_model_len:.1f} full contexts of {max_model_len:,}"


def kv_tokens(layout: KVLayout, num_blocks: Sequence[int]) -> int:
    """Tokens that every group has blocks for."""
    return min(have * group.block_tokens for have, group in zip(num_blocks, layout.groups, strict=True))


def human_size(size_bytes: int) -> str:
    """A size for people, rounded up."""
    units = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)]
    unit, size = next((pair for pair in units if size_bytes >= 10 * pair[1]), units[-1])
    return f"{-(-size_bytes // size)}{unit}"
