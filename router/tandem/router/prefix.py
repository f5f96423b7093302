"""What the index knows about a prompt: the hashes of its blocks for every kind of worker, and who holds how many."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tandem.core.blockhash import BlockHash, HashRoot, chain
from tandem.core.ids import WorkerId
from tandem.core.lifecycle import RoleName
from tandem.core.pairing import KVProfile, lossy_name, offers_for
from tandem.router.wire import WorkerFacts

SpeedOf = Callable[[WorkerId, WorkerId], float | None]
"""Measured bytes a second from a prefill to a decode worker; None = nobody measured it."""


class PrefixIndex(Protocol):
    """How many leading blocks of a prompt each worker holds. Advice: workers check before they use a block."""

    def lookup(self, hashes: Sequence[BlockHash]) -> Mapping[WorkerId, int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixView:
    """By worker: leading prompt tokens whose blocks it holds, how many of them it need not compute again (whole blocks,
    and never the last token, whose logits are wanted), and the last full block's hash as it must compute it.

    `lossy_tokens`: by decode worker, then by HashRoot.lossy, leading prompt tokens that it holds from prefill workers
    whose blocks a conversion or codec changes on their way to it.
    """

    held_tokens: dict[WorkerId, int] = field(default_factory=dict)
    reusable_tokens: dict[WorkerId, int] = field(default_factory=dict)
    lossy_tokens: dict[WorkerId, dict[str, int]] = field(default_factory=dict)
    last_hashes: dict[WorkerId, bytes] = field(default_factory=dict)


class PrefixFinder:
    """Hashes a prompt once for every distinct hash root among the workers, and looks the hashes up."""

    def __init__(
        self, index: PrefixIndex | None, salt: bytes, link_speed: SpeedOf = lambda prefill, decode: None
    ) -> None:
        self._index, self._link_speed = index, link_speed
        self.salt = salt

    def find(self, prompt: Sequence[int], workers: Iterable[WorkerFacts]) -> PrefixView:
        every = list(workers)
        senders = [(f.worker, _sender_key(f.profile), f.profile) for f in every if f.role is RoleName.PREFILL]
        chains = _Chains(prompt, self.salt, self._index)
        view = PrefixView()
        for facts in every:
            size = facts.block_tokens
            blocks = chains.held(facts.fingerprint, size, "").get(facts.worker, 0)
            view.held_tokens[facts.worker] = blocks * size
            view.reusable_tokens[facts.worker] = min(blocks, (len(prompt) - 1) // max(1, size)) * size
            view.last_hashes[facts.worker] = chains.last(facts.fingerprint, size)
            if facts.role is RoleName.DECODE:
                view.lossy_tokens[facts.worker] = {
                    lossy: chains.held(facts.fingerprint, size, lossy).get(facts.worker, 0) * size
                    for lossy in set(self._lossy_names(senders, facts))
                }
        return view

    def _lossy_names(
        self, senders: Iterable[tuple[WorkerId, tuple[object, ...], KVProfile]], receiver: WorkerFacts
    ) -> Iterator[str]:
        """The lossy forms in which blocks of any of these senders reach `receiver`; equal senders are asked once."""
        seen: set[tuple[object, ...]] = set()
        for worker, key, sender in senders:
            offered = offers_for(sender, self._link_speed(worker, receiver.worker)) if sender.offers else ()
            is_new = (key, offered) not in seen
            if is_new and len(sender.layout.groups) == len(receiver.profile.layout.groups):
                seen.add((key, offered))
                if name := lossy_name(sender, receiver.profile, offered=offered):
                    yield name


class _Chains:
    """Hash chains of one prompt, and who holds how much of each; every chain is computed and looked up once."""

    def __init__(self, prompt: Sequence[int], salt: bytes, index: PrefixIndex | None) -> None:
        self._prompt, self._salt, self._index = prompt, salt, index
        self._hashes: dict[tuple[str, int, str], list[BlockHash]] = {}
        self._held: dict[tuple[str, int, str], Mapping[WorkerId, int]] = {}

    def held(self, fingerprint: str, block_tokens: int, lossy: str) -> Mapping[WorkerId, int]:
        """Leading blocks under that root by worker."""
        key = (fingerprint, block_tokens, lossy)
        if key not in self._held:
            hashes = self._chain(key)
            self._held[key] = self._index.lookup(hashes) if self._index is not None and hashes else {}
        return self._held[key]

    def last(self, fingerprint: str, block_tokens: int) -> bytes:
        """The exact hash of the last full block; empty = there is no full block."""
        hashes = self._chain((fingerprint, block_tokens, ""))
        return hashes[-1] if hashes else b""

    def _chain(self, key: tuple[str, int, str]) -> list[BlockHash]:
        if key not in self._hashes:
            fingerprint, size, lossy = key
            root = HashRoot(fingerprint=fingerprint, block_tokens=size, salt=self._salt, lossy=lossy)
            self._hashes[key] = chain(root.digest(), self._prompt, size) if size else []
        return self._hashes[key]


def _sender_key(profile: KVProfile) -> tuple[object, ...]:
    """Equal for prefill workers whose blocks arrive in the same form everywhere, if they offer the same codecs."""
    dtypes = tuple(group.dtype for group in profile.layout.groups)
    return (profile.fingerprint, dtypes, profile.codecs)
