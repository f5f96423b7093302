"""What is known of a prompt's blocks: their hashes for every kind of worker, who holds how many of them by the index,
and who is about to, because this router just sent the like there."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from tandem.core.blockhash import BlockHash, HashRoot, chain
from tandem.core.ids import WorkerId
from tandem.core.lifecycle import RoleName
from tandem.core.pairing import KVProfile, lossy_name, offers_for
from tandem.prefixindex.speculation import Holder, Speculation
from tandem.router.wire import WorkerFacts

SpeedOf = Callable[[WorkerId, WorkerId], float | None]
"""Measured bytes a second from a prefill to a decode worker; None = nobody measured it."""


class PrefixIndex(Protocol):
    """How many leading blocks of a prompt each worker holds. Advice: workers check before they use a block."""

    def lookup(self, hashes: Sequence[BlockHash]) -> Mapping[WorkerId, int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixView:
    """By worker: leading prompt tokens whose blocks it holds, how many it need not compute again (whole blocks, held or
    expected there, and never the last token, whose logits are wanted), how many of these are only expected, the hashes
    of all full blocks and the last one of them as it must compute it.

    `lossy_tokens`: by decode worker, then by HashRoot.lossy, leading prompt tokens that it holds from prefill workers
    whose blocks a conversion or codec changes on their way to it.
    """

    held_tokens: dict[WorkerId, int] = field(default_factory=dict)
    reusable_tokens: dict[WorkerId, int] = field(default_factory=dict)
    expected_tokens: dict[WorkerId, int] = field(default_factory=dict)
    lossy_tokens: dict[WorkerId, dict[str, int]] = field(default_factory=dict)
    hashes: dict[WorkerId, Sequence[BlockHash]] = field(default_factory=dict)
    last_hashes: dict[WorkerId, bytes] = field(default_factory=dict)

    def computed_whole(self) -> PrefixView:
        """The same for a request whose prompt is computed whatever is cached: it wants the logits."""
        nothing = dict.fromkeys(self.reusable_tokens, 0)
        return replace(self, reusable_tokens=nothing, expected_tokens=nothing)


class PrefixFinder:
    """Hashes a prompt once for every distinct hash root among the workers, and looks the hashes up.

    Without a `speculation`, nothing counts as held that the index does not show.
    """

    def __init__(
        self,
        index: PrefixIndex | None,
        salt: bytes,
        link_speed: SpeedOf = lambda prefill, decode: None,
        speculation: Speculation | None = None,
    ) -> None:
        self._index, self._link_speed, self._speculation = index, link_speed, speculation
        self.salt = salt

    def find(self, prompt: Sequence[int], workers: Iterable[WorkerFacts], salt: bytes = b"") -> PrefixView:
        """What is known of `prompt` under `salt`; empty = this finder's own."""
        every = list(workers)
        senders = [(f.worker, _sender_key(f.profile), f.profile) for f in every if f.role is RoleName.PREFILL]
        chains = _Chains(prompt, salt or self.salt, self._index, self._speculation)
        view = PrefixView()
        for facts in every:
            size = facts.block_tokens
            held = chains.held(facts.fingerprint, size, "").get(facts.worker, 0)
            expected = chains.expected(facts.fingerprint, size).get((facts.worker, facts.incarnation), 0)
            most = (len(prompt) - 1) // max(1, size)
            view.held_tokens[facts.worker] = held * size
            view.reusable_tokens[facts.worker] = min(max(held, expected), most) * size
            view.expected_tokens[facts.worker] = max(0, min(expected, most) - held) * size
            hashes = view.hashes[facts.worker] = chains.hashes(facts.fingerprint, size)
            view.last_hashes[facts.worker] = hashes[-1] if hashes else b""
            if facts.role is RoleName.DECODE:
                view.lossy_tokens[facts.worker] = {
                    lossy: chains.held(facts.fingerprint, size, lossy).get(facts.worker, 0) * size
                    for lossy in set(self._lossy_names(senders, facts))
                }
        return view

    def expect(self, request: str, worker: WorkerFacts, view: PrefixView) -> None:
        """`worker` was sent the prompt of `view`, to compute it: its blocks count as held there for a while."""
        hashes = view.hashes.get(worker.worker, ())
        is_held = view.held_tokens.get(worker.worker, 0) >= len(hashes) * worker.block_tokens
        if self._speculation is not None and not is_held:
            self._speculation.expect(request, worker.worker, worker.incarnation, hashes)

    def settle(self, request: str, worker: WorkerId) -> None:
        """`worker` has computed the prompt of this request."""
        if self._speculation is not None:
            self._speculation.settle(request, worker)

    def withdraw(self, request: str, worker: WorkerId) -> None:
        """`worker` has no more to do with this request; what it has not computed by now, it will not."""
        if self._speculation is not None:
            self._speculation.withdraw(request, worker)

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

    def __init__(
        self, prompt: Sequence[int], salt: bytes, index: PrefixIndex | None, speculation: Speculation | None
    ) -> None:
        self._prompt, self._salt, self._index, self._speculation = prompt, salt, index, speculation
        self._hashes: dict[tuple[str, int, str], list[BlockHash]] = {}
        self._held: dict[tuple[str, int, str], Mapping[WorkerId, int]] = {}
        self._expected: dict[tuple[str, int], Mapping[Holder, int]] = {}

    def held(self, fingerprint: str, block_tokens: int, lossy: str) -> Mapping[WorkerId, int]:
        """Leading blocks under that root by worker."""
        key = (fingerprint, block_tokens, lossy)
        if key not in self._held:
            hashes = self._chain(key)
            self._held[key] = self._index.lookup(hashes) if self._index is not None and hashes else {}
        return self._held[key]

    def expected(self, fingerprint: str, block_tokens: int) -> Mapping[Holder, int]:
        """Leading blocks that workers are about to hold, by worker and incarnation."""
        key = (fingerprint, block_tokens)
        if key not in self._expected:
            hashes = self.hashes(fingerprint, block_tokens)
            self._expected[key] = self._speculation.lookup(hashes) if self._speculation is not None else {}
        return self._expected[key]

    def hashes(self, fingerprint: str, block_tokens: int) -> Sequence[BlockHash]:
        """The exact hashes of all full blocks."""
        return self._chain((fingerprint, block_tokens, ""))

    def _chain(self, key: tuple[str, int, str]) -> list[BlockHash]:
        if key not in self._hashes:
            fingerprint, size, lossy = key
            root = _root(fingerprint, size, self._salt, lossy)
            self._hashes[key] = chain(root, self._prompt, size) if size else []
        return self._hashes[key]


@functools.lru_cache(maxsize=256)
def _root(fingerprint: str, block_tokens: int, salt: bytes, lossy: str) -> BlockHash:
    return HashRoot(fingerprint=fingerprint, block_tokens=block_tokens, salt=salt, lossy=lossy).digest()


def _sender_key(profile: KVProfile) -> tuple[object, ...]:
    """Equal for prefill workers whose blocks arrive in the same form everywhere, if they offer the same codecs."""
    dtypes = tuple(group.dtype for group in profile.layout.groups)
    return (profile.fingerprint, dtypes, profile.codecs)
