"""The router's knowledge of a prompt's blocks, by the root that each worker files them under."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tandem.core.block_hash import BlockHash, HashRoot, chain
from tandem.core.clock import ManualClock
from tandem.core.ids import WorkerId
from tandem.core.kv_compatibility import ALWAYS_BYTES_PER_S
from tandem.core.lifecycle import RoleName
from tandem.router.routing.prefix_popularity import Popularity
from tandem.router.workers.prefix_lookup import KeptHashes, PrefixFinder
from tandem.statestore.index.speculation import SETTLED_S, Speculation
from tests.unit.router.facts import facts

PROMPT = list(range(100, 196))
SALT = b"tenant"


class Held:
    """An index in which each worker holds so many leading blocks under one root; counts how often it is asked."""

    def __init__(self, *held: tuple[str, int, int, str]) -> None:
        self.lookups = 0
        self._held: dict[BlockHash, set[WorkerId]] = {}
        for worker, block_tokens, blocks, lossy in held:
            root = HashRoot(fingerprint="f", block_tokens=block_tokens, salt=SALT, lossy=lossy).digest()
            for block in chain(root, PROMPT, block_tokens)[:blocks]:
                self._held.setdefault(block, set()).add(WorkerId(worker))

    def lookup(self, hashes: Sequence[BlockHash]) -> Mapping[WorkerId, int]:
        self.lookups += 1
        counts: dict[WorkerId, int] = {}
        for depth, block in enumerate(hashes):
            for worker in self._held.get(block, ()):
                if counts.get(worker, 0) == depth:
                    counts[worker] = depth + 1
        return counts


def test_every_worker_is_asked_in_blocks_of_its_own_size() -> None:
    index = Held(("p0", 16, 3, ""), ("d0", 8, 5, ""), ("d1", 24, 4, ""))
    workers = [
        facts("p0", RoleName.PREFILL), facts("d0", RoleName.DECODE, 8), facts("d1", RoleName.DECODE, 24),
        facts("d2", RoleName.DECODE, 24),
    ]  # fmt: skip
    view = PrefixFinder(index, SALT).find(PROMPT, workers)
    assert view.held_tokens == {"p0": 48, "d0": 40, "d1": 96}
    assert view.reusable_tokens == {"p0": 48, "d0": 40, "d1": 72}  # the last token is computed again
    assert view.lossy_tokens == {}
    assert index.lookups == 3
    for worker in workers:
        root = HashRoot(fingerprint="f", block_tokens=worker.block_tokens, salt=SALT).digest()
        assert view.last_hashes[worker.worker] == chain(root, PROMPT, worker.block_tokens)[-1]


def test_what_came_changed_is_looked_up_under_its_own_root() -> None:
    index = Held(("d0", 16, 2, ""), ("d0", 16, 5, "float32>bfloat16"), ("d1", 16, 3, ""), ("d1", 16, 4, "int8"))
    always: dict[str, Any] = {"offers": ("int8",), "offers_below_bytes_per_s": ALWAYS_BYTES_PER_S}
    workers = [
        facts("p0", RoleName.PREFILL), facts("p1", RoleName.PREFILL), facts("p2", RoleName.PREFILL, **always),
        facts("d0", RoleName.DECODE, dtype="bfloat16"), facts("d1", RoleName.DECODE),
    ]  # fmt: skip
    view = PrefixFinder(index, SALT).find(PROMPT, workers)
    assert view.held_tokens == {"d0": 32, "d1": 48}
    assert view.lossy_tokens == {"d0": {"float32>bfloat16": 80}, "d1": {"int8": 64}}
    assert index.lookups == 4  # one a root, for all workers


def test_without_an_index_and_with_a_short_prompt() -> None:
    view = PrefixFinder(None, SALT).find([1, 2, 3], [facts("d0", RoleName.DECODE)])
    assert (view.held_tokens, view.last_hashes) == ({}, {"d0": b""})


def test_a_burst_finds_what_the_first_of_it_was_sent_for() -> None:
    index, clock = Held(("p1", 16, 1, "")), ManualClock()
    finder = PrefixFinder(index, SALT, speculation=Speculation(clock))
    p0, p1, d0 = facts("p0", RoleName.PREFILL), facts("p1", RoleName.PREFILL), facts("d0", RoleName.DECODE)
    finder.expect("first", p0, finder.find(PROMPT, [p0, p1, d0]))
    longer = [*PROMPT, *range(40)]
    view = finder.find(longer, [p0, p1, d0])
    assert view.held_tokens == {"p1": 16}  # expected blocks are never asked for
    assert view.reusable_tokens == {"p0": 96, "p1": 16}
    assert view.expected_tokens == {"p0": 96}
    assert finder.find(PROMPT, [p0]).reusable_tokens == {"p0": 80}  # the last token is computed again
    reborn = facts("p0", RoleName.PREFILL, incarnation=2)
    assert finder.find(PROMPT, [reborn]).reusable_tokens == {}
    finder.withdraw("first", p0.worker)
    assert finder.find(longer, [p0]).reusable_tokens == {}


def test_who_else_begins_with_what_is_held_is_counted() -> None:
    """By the held part of the prompt; only sent prompts count, and not those without any held block."""
    clock = ManualClock()
    finder = PrefixFinder(Held(("p0", 16, 4, "")), SALT, popularity=Popularity(clock))
    p0 = facts("p0", RoleName.PREFILL)
    for own in range(3):
        view = finder.find([*PROMPT[:64], *range(1000 * own, 1000 * own + 32)], [p0])
        assert view.followers == own
        finder.expect(str(own), p0, view)
    assert finder.find(PROMPT, [p0]).followers == 3
    assert finder.find(PROMPT[:40], [p0]).followers == 0
    nobody = PrefixFinder(None, SALT, popularity=Popularity(clock))
    nobody.expect("new", p0, nobody.find(PROMPT, [p0]))
    assert nobody.find(PROMPT, [p0]).followers == 0


def test_what_the_index_shows_is_not_expected_again() -> None:
    index, clock = Held(("p0", 16, 6, "")), ManualClock()
    speculation = Speculation(clock)
    finder = PrefixFinder(index, SALT, speculation=speculation)
    p0 = facts("p0", RoleName.PREFILL)
    finder.expect("held", p0, finder.find(PROMPT, [p0]))
    assert speculation.blocks == 0
    finder.expect("longer", p0, finder.find([*PROMPT, *range(16)], [p0]))
    finder.settle("longer", p0.worker)
    assert speculation.blocks == 7
    clock.advance(SETTLED_S)
    assert finder.find([*PROMPT, *range(40)], [p0]).reusable_tokens == {"p0": 96}


def test_a_prompt_that_is_computed_whole_reuses_nothing_but_is_held_all_the_same() -> None:
    index = Held(("p0", 16, 3, ""), ("d0", 16, 5, ""))
    view = PrefixFinder(index, SALT).find(PROMPT, [facts("p0", RoleName.PREFILL), facts("d0", RoleName.DECODE)])
    whole = view.computed_whole()
    assert (view.reusable_tokens, whole.reusable_tokens) == ({"p0": 48, "d0": 80}, {})
    assert (whole.held_tokens, whole.last_hashes) == (view.held_tokens, view.last_hashes)


def test_a_prompt_is_hashed_once_however_often_it_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    def counted(root: BlockHash, tokens: Sequence[int], block_tokens: int) -> list[BlockHash]:
        hashed.append(block_tokens)
        return chain(root, tokens, block_tokens)

    monkeypatch.setattr("tandem.router.workers.prefix_lookup.chain", counted)
    finder, kept = PrefixFinder(Held(("p0", 16, 3, "")), SALT), KeptHashes()
    first = finder.find(PROMPT, [facts("p0", RoleName.PREFILL)], kept=kept)
    again = finder.find(PROMPT, [facts("p0", RoleName.PREFILL), facts("p1", RoleName.PREFILL)], kept=kept)
    assert hashed == [16]
    assert again.held_tokens == {"p0": 48}
    assert again.hashes[WorkerId("p1")] == first.hashes[WorkerId("p0")]
    finder.find(PROMPT, [facts("p2", RoleName.PREFILL, 8)], kept=kept)
    assert hashed == [16, 8]
