"""Recently shared prefixes of prompts: those to save of a worker that leaves, and the worker that takes each.

Decisions alone, and a bounded memory of tokens: hashes do not contain them, and fetching blocks needs them. One thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tandem.core.lifecycle import RoleName
from tandem.router.routing.cost_model import Estimates
from tandem.router.routing.plan import Candidate, Job

MAX_TOKENS: Final = 131_072
"""Tokens remembered at once: some 5 MB. A prompt that is longer is not remembered."""
MIN_FOLLOWERS: Final = 1.0
"""Prompts that are to be expected in the next minute; fewer are not worth a copy."""
NOTED_FOLLOWERS: Final = MIN_FOLLOWERS / 2
"""With fewer it is not remembered yet: a turn of a conversation without other users would push others out."""
ROOM_SHARE: Final = 0.5
"""Largest share of the free blocks of the worker that takes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HotPrefix:
    """The first `tokens` of `prompt`; its last block is named `key`, under `salt` for workers of `model`."""

    key: bytes
    prompt: Sequence[int]
    tokens: int
    salt: bytes
    model: str


class HotPrefixes:
    """The prefixes that were asked for last. Past `max_tokens` the one asked for least recently goes first."""

    def __init__(self, *, max_tokens: int = MAX_TOKENS) -> None:
        self._max_tokens, self._tokens = max_tokens, 0
        self._known: OrderedDict[bytes, HotPrefix] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def note(
        self, key: bytes, prompt: Sequence[int], tokens: int, salt: bytes, model: str, followers: float = MIN_FOLLOWERS
    ) -> None:
        """A prompt with this prefix was sent off, when so many `followers` were to be expected; b"" = no worker holds
        any of it."""
        if not key or tokens > self._max_tokens or followers < NOTED_FOLLOWERS:
            return
        if key not in self._known:
            # One more token is computed in any case: then all of the prefix can be fetched.
            kept = prompt[: tokens + 1]
            self._known[key] = HotPrefix(key=key, prompt=kept, tokens=tokens, salt=salt, model=model)
            self._tokens += len(kept)
        self._known.move_to_end(key)
        while self._tokens > self._max_tokens:
            _, oldest = self._known.popitem(last=False)
            self._tokens -= len(oldest.prompt)

    def latest(self, model: str) -> list[HotPrefix]:
        """All for workers of this model, last asked for first."""
        return [one for one in reversed(self._known.values()) if one.model in ("", model)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """The worker that takes a prefix, and how long fetching what it lacks takes. `token_bytes`: of KV a token there."""

    to: Candidate
    token_bytes: float
    fetch_s: float


def saving(prefix: HotPrefix, leaving: Candidate, staying: Sequence[Candidate]) -> Saving | None:
    """Choose the worker that takes the prefix, None = not worth it. It is if no staying worker has all that `leaving`
    has of it, and the one that takes it fetches it sooner than it would compute it once."""
    held = min(leaving.held_tokens, prefix.tokens)
    if not held or any(one.reusable_tokens >= held for one in staying):
        return None
    computing = [one for one in staying if one.role is not RoleName.DECODE]
    job = Job(prompt_tokens=len(prefix.prompt), max_tokens=1)
    estimates = Estimates(job, [*staying, leaving])
    found: list[tuple[float, Candidate]] = []
    for one in computing or staying:
        saved_s = {other.worker: saved_s for saved_s, other in estimates.sources(one)}.get(leaving.worker, 0.0)
        if saved_s > 0 and _has_room(one, held):
            found.append((saved_s, one))
    if not found:
        return None
    _, to = min(found, key=lambda pair: (-pair[0], pair[1].in_flight, pair[1].last_used, pair[1].worker))
    fetch_s = estimates.fetch_s(to, leaving, held - to.reusable_tokens)
    return Saving(to=to, token_bytes=estimates.token_bytes(to), fetch_s=fetch_s)


def _has_room(one: Candidate, tokens: int) -> bool:
    groups = one.profile.layout.groups if one.profile is not None else ()
    need = max((group.blocks_for(tokens) for group in groups), default=0)
    return need <= one.free_blocks * ROOM_SHARE
