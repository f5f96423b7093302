"""Tracks which KV of a prompt is computed, and which part still has to be pushed. Pure bookkeeping."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.kv_layout import KVGroupSpec


@dataclass(frozen=True, slots=True)
class PlannedPush:
    """Logical blocks [first, last), of the receiver's size, of layers [first_layer, last_layer) of the group (indices
    within the group)."""

    first: int
    last: int
    first_layer: int
    last_layer: int


class PushPlan:
    """Progress of one prompt in one KV group, layer by layer.

        layer 0   ████████████░░      █ pushed   ░ computed, waits for the rest of its block   · to be computed
        layer 1   ████████░░░░··
                  ^skip

    A block is ready in a layer when all of its tokens are computed there, or with the prompt's last token. Blocks are
    the receiver's; `source` maps them to ours:

        ours       ├──── 16 ────┼──── 16 ────┼──── 16 ──┄       receiver's blocks 2 … 4 are our blocks 1 … 2,
        receiver's ├── 10 ──┼── 10 ──┼── 10 ──┼── 10 ──┼┄       from token 4 of block 1 on
    """

    def __init__(self, spec: KVGroupSpec, prompt_tokens: int, cached_tokens: int) -> None:
        self._spec = spec
        self._prompt_tokens = prompt_tokens
        self._computed = [cached_tokens] * len(spec.layers)
        self._pushed = [0] * len(spec.layers)
        self._block_tokens = spec.block_tokens
        self._is_open = False

    def open(self, skip: int, block_tokens: int) -> None:
        """Take in the ticket; the receiver already has the first `skip` blocks, of `block_tokens`."""
        self._block_tokens = block_tokens
        self._pushed = [skip] * len(self._pushed)
        self._is_open = True

    def source(self, push: PlannedPush) -> tuple[slice, int, int]:
        """Return the source of a push: our logical blocks, the first token in the first of them, and the number of
        tokens.

        Past the prompt's last block nothing is named: the receiver's last block is filled up with zeros.
        """
        ours = self._spec.block_tokens
        index, offset_tokens = divmod(push.first * self._block_tokens, ours)
        end = min(push.last * self._block_tokens, self._prompt_tokens)
        return slice(index, self._spec.blocks_for(end)), offset_tokens, end - push.first * self._block_tokens

    def close(self) -> None:
        """Close the plan of a revoked ticket: its pushes are void."""
        self._is_open = False

    def computed(self, first_layer: int, last_layer: int, tokens: int) -> None:
        """Record that prompt tokens below `tokens` are computed in these model layers."""
        for index, layer in enumerate(self._spec.layers):
            if first_layer <= layer < last_layer:
                self._computed[index] = max(self._computed[index], tokens)

    def take(self) -> list[PlannedPush]:
        """Return pushes that became ready since the last call; neighbouring layers with the same blocks come as one."""
        if not self._is_open:
            return []
        pushes: list[PlannedPush] = []
        for layer, (tokens, pushed) in enumerate(zip(self._computed, self._pushed, strict=True)):
            ready = self._ready_blocks(tokens)
            if ready <= pushed:
                continue
            last = pushes[-1] if pushes else None
            if last and last.last_layer == layer and (last.first, last.last) == (pushed, ready):
                pushes[-1] = PlannedPush(pushed, ready, last.first_layer, layer + 1)
            else:
                pushes.append(PlannedPush(pushed, ready, layer, layer + 1))
            self._pushed[layer] = ready
        return pushes

    @property
    def is_complete(self) -> bool:
        """True if everything that the receiver needs was taken."""
        blocks = self._ready_blocks(self._prompt_tokens)
        return self._is_open and all(pushed >= blocks for pushed in self._pushed)

    def _ready_blocks(self, tokens: int) -> int:
        if tokens >= self._prompt_tokens:
            return -(-self._prompt_tokens // self._block_tokens)
        return tokens // self._block_tokens
