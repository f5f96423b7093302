"""The shape of the KV cache: groups of layers, blocks of tokens, bytes of each. Pure arithmetic.

The pool of one group on one rank is `[num_blocks, group_layers, planes, heads_local, block_tokens, width]`:

    block 0                                     block 1 …
    ├── layer 0 ───────────────┬── layer 1 …
    │   plane K      plane V   │
    │   h0 h1 …      h0 h1 …   │      each head: block_tokens × width elements

A whole block is one contiguous run, a range of layers of a block is one run, a slice of heads is one run for each
layer and plane.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.ids import GroupId

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""All dtypes that KV may be stored in, with bytes of a number; each converts to each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroupSpec:
    """Layers that share KV shape and window. `layers` are model layer indices; `heads` counts all ranks' KV heads."""

    group: GroupId
    layers: tuple[int, ...]
    planes: int
    heads: int
    width: int
    block_tokens: int
    dtype: str
    window: int | None = None
    is_replicated: bool = False

    def heads_local(self, tp: int) -> int:
        """KV heads that one of `tp` ranks holds (replicated groups and tp > heads: at least one)."""
        if self.is_replicated:
            return self.heads
        if self.heads % tp and tp % self.heads:
            raise ValueError(f"{self.heads} KV heads cannot be split over {tp} ranks")
        return max(1, self.heads // tp)

    def heads_of(self, rank: int, tp: int) -> range:
        """The model's KV heads that `rank` of `tp` holds: its share; one, shared, if tp > heads; all if replicated."""
        if self.is_replicated:
            return range(self.heads)
        local = self.heads_local(tp)
        first = rank * local if tp <= self.heads else rank // (tp // self.heads)
        return range(first, first + local)

    def head_bytes(self) -> int:
        """Bytes of one head of one plane of one layer of one block: block_tokens × width × dtype."""
        return self.block_tokens * self.width * DTYPE_BYTES[self.dtype]

    def layer_bytes(self, tp: int = 1) -> int:
        """Bytes of one layer of one block on one rank."""
        return self.planes * self.heads_local(tp) * self.head_bytes()

    def block_bytes(self, tp: int = 1) -> int:
        """Bytes of one whole block on one rank."""
        return len(self.layers) * self.layer_bytes(tp)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_tokens)

    def first_needed(self, computed: int) -> int:
        """The first block that tokens from position `computed` on attend to; those before it left the window."""
        return 0 if self.window is None else max(0, computed - self.window + 1) // self.block_tokens

    def first_to_hand_over(self, prompt_tokens: int) -> int:
        """The first block of a prompt that the worker that continues it needs: for the first output token, and for a
        hit when the same prompt comes again, which ends before its last token."""
        return self.first_needed((prompt_tokens - 1) // self.block_tokens * self.block_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """All KV groups of a model, in group-id order, and the TP that this worker shards them over."""

    groups: tuple[KVGroupSpec, ...]
    tp: int = 1

    def __post_init__(self) -> None:
        if [g.group for g in self.groups] != list(range(len(self.groups))):
            raise ValueError("KV groups must be numbered 0, 1, … in order")

    def token_bytes(self) -> int:
        """KV bytes of one token on one rank, over all groups (blocks counted as full)."""
        return sum(g.block_bytes(self.tp) // g.block_tokens for g in self.groups)
