"""Finds the longest prefix of a prompt that is cached in every KV group. Reads ledgers, holds nothing.

whole context   every block before the hit's end must be here
window          those that the first token behind the hit attends to, no others

          ├── gone ──┤├── gone ──┤├─ cached ─┤├─ cached ─┤│ first token to compute
                                  ◀──────── window ────────▶
"""

from __future__ import annotations

from collections.abc import Sequence

from tandem.core.block_hash import BlockHash
from tandem.core.kv_layout import KVGroupSpec
from tandem.core.ledger import BlockLedger


def longest_hit(
    ledgers: Sequence[BlockLedger], specs: Sequence[KVGroupSpec], hashes: Sequence[BlockHash], *, is_whole: bool
) -> int:
    """Leading blocks of `hashes` that need not be computed; `is_whole`: all of them must be here, also behind
    windows."""
    count, before = len(hashes), -1
    while count != before:  # a block that one group lacks may end the hit where another one lacks one, too
        before = count
        for ledger, spec in zip(ledgers, specs, strict=True):
            if is_whole or spec.window is None:
                count = len(ledger.match(hashes[:count]))
            else:
                count = _longest_in_window(ledger, spec, hashes, count)
    return count


def _longest_in_window(ledger: BlockLedger, spec: KVGroupSpec, hashes: Sequence[BlockHash], count: int) -> int:
    """The largest hit up to `count` with all blocks here to which a token behind it attends."""
    index = count
    while index > spec.first_needed(count * spec.block_tokens):
        index -= 1
        if not ledger.is_findable(hashes[index]):
            count = index  # every longer hit that is left would need this block
    return count
