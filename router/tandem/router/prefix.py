"""What the index knows about a prompt: the hashes of its blocks for every kind of worker, and who holds how many."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tandem.core.blockhash import BlockHash, HashRoot, chain
from tandem.core.ids import WorkerId
from tandem.router.wire import WorkerFacts


class PrefixIndex(Protocol):
    """How many leading blocks of a prompt each worker holds. Advice: workers check before they use a block."""

    def lookup(self, hashes: Sequence[BlockHash]) -> Mapping[WorkerId, int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixView:
    """By worker: leading prompt tokens whose blocks it holds, how many of them it need not compute again (whole blocks,
    and never the last token, whose logits are wanted), and the last full block's hash as it must compute it."""

    held_tokens: dict[WorkerId, int] = field(default_factory=dict)
    reusable_tokens: dict[WorkerId, int] = field(default_factory=dict)
    last_hashes: dict[WorkerId, bytes] = field(default_factory=dict)


class PrefixFinder:
    """Hashes a prompt once for every distinct hash root among the workers, and looks the hashes up."""

    def __init__(self, index: PrefixIndex | None, salt: bytes) -> None:
        self._index = index
        self.salt = salt

    def find(self, prompt: Sequence[int], workers: Iterable[WorkerFacts]) -> PrefixView:
        chains: dict[tuple[str, int], list[BlockHash]] = {}
        view = PrefixView()
        held: dict[tuple[str, int], dict[WorkerId, int]] = {}
        for facts in workers:
            key = (facts.fingerprint, facts.block_tokens)
            if key not in chains:
                root = HashRoot(fingerprint=facts.fingerprint, block_tokens=facts.block_tokens, salt=self.salt)
                hashes = chain(root.digest(), prompt, facts.block_tokens) if facts.block_tokens else []
                chains[key] = hashes
                held[key] = dict(self._index.lookup(hashes)) if self._index is not None and hashes else {}
            blocks = held[key].get(facts.worker, 0)
            reusable = min(blocks, (len(prompt) - 1) // max(1, facts.block_tokens))
            view.held_tokens[facts.worker] = blocks * facts.block_tokens
            view.reusable_tokens[facts.worker] = reusable * facts.block_tokens
            view.last_hashes[facts.worker] = chains[key][-1] if chains[key] else b""
        return view
