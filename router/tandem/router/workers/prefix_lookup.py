"""Looks up a prompt's blocks: their hashes for every kind of worker, how many of them each worker holds by the index,
and how many it is about to hold, because this router just sent the like there."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from tandem.core.block_hash import BlockHash, HashRoot, chain
from tandem.core.ids import WorkerId
from tandem.core.kv_compatibility import KVProfile, lossy_name, offers_for
from tandem.core.state_enums import RoleName
from tandem.router.routing.observed_traffic import Popularity
from tandem.router.workers.proto_convert import WorkerFacts
from tandem.statestore.index.speculation import Holder, Speculation

SpeedOf = Callable[[WorkerId, WorkerId], float | None]
"""Measured bytes a second from a prefill to a decode worker; None = not measured."""
KeptHashes = dict[tuple[str, int, str], list[BlockHash]]
"""Hashes of one prompt under one salt, by fingerprint, block tokens and HashRoot.lossy."""


class PrefixIndex(Protocol):
    """Index of the leading blocks of prompts at each worker. Advice: workers check before they use a block."""

    def lookup(self, hashes: Sequence[BlockHash]) -> Mapping[WorkerId, int]: ...


@dataclass(slots=True, kw_only=True)  # never changed once it was given, but frozen it would take longer to make
class PrefixView:
    """By worker: leading prompt tokens in blocks that it holds, how many it need not compute again (whole blocks, held
    or expected there, and never the last token: its logits are wanted) and how many of these are only expected, where
    there are any; and of every worker the hashes of all full blocks and the last one of them as it must compute it.

    `lossy_tokens`: by decode worker, then by HashRoot.lossy, leading prompt tokens that it holds from prefill workers
    with blocks that a conversion or codec changes on their way to it.

    `shared`: the deepest block that any worker holds or is expected to, b"" = none, and up to it `shared_tokens` of the
    prompt; `followers`: see `Popularity`.
    """

    held_tokens: dict[WorkerId, int] = field(default_factory=dict)
    reusable_tokens: dict[WorkerId, int] = field(default_factory=dict)
    expected_tokens: dict[WorkerId, int] = field(default_factory=dict)
    lossy_tokens: dict[WorkerId, dict[str, int]] = field(default_factory=dict)
    hashes: dict[WorkerId, Sequence[BlockHash]] = field(default_factory=dict)
    last_hashes: dict[WorkerId, bytes] = field(default_factory=dict)
    shared: bytes = b""
    shared_tokens: int = 0
    followers: float = 0.0

    @property
    def is_known_somewhere(self) -> bool:
        """True if any worker has, or is about to have, anything of the prompt."""
        return bool(self.held_tokens or self.reusable_tokens or self.lossy_tokens)

    def computed_whole(self) -> PrefixView:
        """The same for a request that needs its prompt's logits: all of it is computed."""
        return replace(self, reusable_tokens={}, expected_tokens={})


class PrefixFinder:
    """Hashes a prompt once for every distinct hash root among the workers, and looks the hashes up.

    Without a `speculation`, nothing counts as held that the index does not show; without a `popularity`, no prompts to
    come are reckoned with.
    """

    def __init__(
        self,
        index: PrefixIndex | None,
        salt: bytes,
        link_speed: SpeedOf = lambda prefill, decode: None,
        speculation: Speculation | None = None,
        popularity: Popularity | None = None,
    ) -> None:
        self._index, self._link_speed, self._speculation = index, link_speed, speculation
        self._popularity = popularity
        self.salt = salt

    def find(
        self, prompt: Sequence[int], workers: Iterable[WorkerFacts], salt: bytes = b"", kept: KeptHashes | None = None
    ) -> PrefixView:
        """Look up `prompt` under `salt`; empty = this finder's own. `kept` has the hashes of this prompt under this
        salt from the calls before, and gets those that are computed now."""
        every = list(workers)
        chains = _Chains(prompt, salt or self.salt, self._index, self._speculation, {} if kept is None else kept)
        view, known, size, fingerprint = PrefixView(), _NOTHING, 0, ""
        for facts in every:
            worker = facts.worker
            if known is _NOTHING or size != facts.block_tokens or fingerprint != facts.fingerprint:
                size, fingerprint = facts.block_tokens, facts.fingerprint
                known = chains.known(fingerprint, size)
            view.hashes[worker], view.last_hashes[worker] = known.hashes, known.last_hash
            if not known.held and not known.expected:  # by no worker with blocks like these
                continue
            held = known.held.get(worker, 0)
            expected = min(known.expected.get((worker, facts.incarnation), 0), known.most)
            reusable = max(min(held, known.most), expected)
            if held:
                view.held_tokens[worker] = held * size
            if reusable:
                view.reusable_tokens[worker] = reusable * size
            if expected > held:
                view.expected_tokens[worker] = (expected - held) * size
        self._find_lossy(every, chains, view)
        if self._popularity is None:
            return view
        shared, tokens = chains.deepest()
        view.shared, view.shared_tokens = shared, tokens
        view.followers = self._popularity.followers(shared)
        return view

    def _find_lossy(self, every: Sequence[WorkerFacts], chains: _Chains, view: PrefixView) -> None:
        """Add what decode workers hold of blocks that change on their way to them."""
        senders = _senders(every)
        is_same_everywhere = not any(sender.offers for _, _, sender in senders)
        # By identity: a router keeps one object of equal profiles.
        names: dict[int, set[str]] = {}
        for facts in every:
            if facts.role is not RoleName.DECODE:
                continue
            found = names.get(id(facts.profile)) if is_same_everywhere else None
            if found is None:
                found = names[id(facts.profile)] = set(self._lossy_names(senders, facts))
            lossy = {
                name: blocks * facts.block_tokens
                for name in found
                if (blocks := chains.held(facts.fingerprint, facts.block_tokens, name).get(facts.worker, 0))
            }
            if lossy:
                view.lossy_tokens[facts.worker] = lossy

    def followers(self, shared: bytes) -> float:
        """Prompts with this prefix that are to be expected; see `Popularity`."""
        return 0.0 if self._popularity is None else self._popularity.followers(shared)

    def expect(self, request: str, worker: WorkerFacts, view: PrefixView, *, is_asked_for: bool = True) -> None:
        """`worker` was sent the prompt of `view`, to compute it: its blocks count as held there for a while.
        `is_asked_for`: by a client; only then more like it are to be expected."""
        if self._popularity is not None and is_asked_for:
            self._popularity.count(view.shared)
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


def _senders(workers: Iterable[WorkerFacts]) -> list[tuple[WorkerId, tuple[object, ...], KVProfile]]:
    """Prefill workers with what makes their blocks alike. Of those that are the same over every link, one is enough: a
    router keeps one object of equal profiles."""
    senders = {}
    for facts in workers:
        if facts.role is RoleName.PREFILL:
            senders[facts.worker if facts.profile.offers else id(facts.profile)] = facts
    return [(facts.worker, _sender_key(facts.profile), facts.profile) for facts in senders.values()]


@dataclass(frozen=True, slots=True)
class _PrefixMatches:
    """Of one exact root: leading blocks by worker, as held and as expected, all hashes, and how many blocks need not be
    computed at most."""

    held: Mapping[WorkerId, int]
    expected: Mapping[Holder, int]
    hashes: Sequence[BlockHash]
    last_hash: bytes
    most: int

    @property
    def deepest(self) -> int:
        """Leading blocks that some worker holds or is expected to."""
        return max((*self.held.values(), *self.expected.values()), default=0)


_NOTHING = _PrefixMatches(held={}, expected={}, hashes=(), last_hash=b"", most=0)


class _Chains:
    """Hash chains of one prompt, and how much of each every worker holds; every chain is computed and looked up
    once."""

    def __init__(
        self,
        prompt: Sequence[int],
        salt: bytes,
        index: PrefixIndex | None,
        speculation: Speculation | None,
        hashes: KeptHashes,
    ) -> None:
        self._prompt, self._salt, self._index, self._speculation = prompt, salt, index, speculation
        self._hashes = hashes
        self._held: dict[tuple[str, int, str], Mapping[WorkerId, int]] = {}
        self._known: dict[tuple[str, int], _PrefixMatches] = {}

    def held(self, fingerprint: str, block_tokens: int, lossy: str) -> Mapping[WorkerId, int]:
        """Leading blocks under that root by worker."""
        key = (fingerprint, block_tokens, lossy)
        if key not in self._held:
            hashes = self._chain(key)
            self._held[key] = self._index.lookup(hashes) if self._index is not None and hashes else {}
        return self._held[key]

    def known(self, fingerprint: str, block_tokens: int) -> _PrefixMatches:
        """All about exact blocks."""
        key = (fingerprint, block_tokens)
        found = self._known.get(key)
        if found is None:
            hashes = self._chain((fingerprint, block_tokens, ""))
            found = self._known[key] = _PrefixMatches(
                held=self.held(fingerprint, block_tokens, ""),
                expected=self._speculation.lookup(hashes) if self._speculation is not None else {},
                hashes=hashes,
                last_hash=hashes[-1] if hashes else b"",
                most=(len(self._prompt) - 1) // max(1, block_tokens),
            )
        return found

    def deepest(self) -> tuple[bytes, int]:
        """The last block that some worker holds, and how many tokens there are up to its end. Of the chain that is
        looked up first among equals."""
        found = [(known.deepest * size, known) for (_, size), known in self._known.items() if known.deepest]
        tokens, known = max(found, key=lambda pair: pair[0], default=(0, None))
        return (known.hashes[known.deepest - 1], tokens) if known is not None and tokens else (b"", 0)

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
    """Equal for prefill workers with blocks that arrive in the same form everywhere, if they offer the same codecs."""
    dtypes = tuple(group.dtype for group in profile.layout.groups)
    return (profile.fingerprint, dtypes, profile.codecs)
