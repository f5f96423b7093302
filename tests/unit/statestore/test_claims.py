"""A hit that a lookup claims is there: what workers hold has no holes, however their requests overlap."""

from __future__ import annotations

import hashlib
import random

import pytest

from tandem.core.block_hash import BlockHash
from tandem.core.ids import BlockId, GroupId, WorkerId
from tandem.core.ledger import BlockLedger, Holder, HoldKind
from tandem.statestore.index.block_table import BlockTable

WORKERS, POOL_BLOCKS, STEPS = 2, 100, 400
SHARED, LONGEST = 25, 45
"""Blocks that prompts of one family share, and of the longest prompt: lookups jump several times."""


def _prompt(family: int, question: int) -> list[BlockHash]:
    found, parent = list[BlockHash](), b"%d" % family
    for index in range(LONGEST):
        parent = hashlib.sha256(parent + (b"" if index < SHARED else b"%d" % question)).digest()[:16]
        found.append(BlockHash(parent))
    return found


PROMPTS = [_prompt(family, question) for family in range(2) for question in range(2)]


class Request:
    """A prompt on its way through a worker; blocks are taken, published and given back as the engine does."""

    def __init__(self, key: str, ledger: BlockLedger, prompt: list[BlockHash]) -> None:
        self.ledger, self.prompt = ledger, prompt
        self.holder = Holder(HoldKind.REQUEST, key)
        self.blocks: list[BlockId] = []
        self.computed = 0

    def admit(self) -> bool:
        hits = self.ledger.match(self.prompt[:-1])
        self.ledger.share(self.holder, hits)
        fresh = self.ledger.allocate(self.holder, len(self.prompt) - len(hits))
        if fresh is None:
            self.ledger.release(self.holder)
            return False
        self.blocks, self.computed = [*hits, *fresh], len(hits)
        return True

    def compute(self, count: int) -> None:
        for index in range(self.computed, min(len(self.prompt), self.computed + count)):
            self.ledger.publish(self.blocks[index], self.prompt[index])
            self.computed = index + 1


class Workers:
    """Their ledgers, and the table that gets every change at once."""

    def __init__(self, rng: random.Random) -> None:
        self._rng, self._names = rng, 0
        self.table = BlockTable(1 << 26)
        self.ledgers = [self._ledger(WorkerId(f"w{number}")) for number in range(WORKERS)]
        self._requests: list[Request] = []
        self._pushes: list[tuple[BlockLedger, Holder]] = []
        self.claims = self.twins = 0

    def _ledger(self, worker: WorkerId) -> BlockLedger:
        bit = self.table.open_slot()
        self.table.go_live(bit, worker)
        return BlockLedger(
            GroupId(0),
            POOL_BLOCKS,
            on_stored=lambda block: self.table.add(bit, [(0, block)]),
            on_removed=lambda block: self.table.remove(bit, [(0, block)]),
        )

    def step(self) -> None:
        """Requests come, often two at once that compute the same; are computed and pushed in parts; and end."""
        rng = self._rng
        kind = rng.choice(("admit", "compute", "compute", "push", "across", "end", "end", "forget"))
        if kind == "admit":
            ledger, prompt = rng.choice(self.ledgers), rng.choice(PROMPTS)
            for _ in range(rng.choice((1, 2))):
                request = Request(self._name(), ledger, prompt[: rng.randint(1, LONGEST)])
                self._requests += [request] if request.admit() else []
        elif kind == "across" and self._pushes:
            ledger, holder = self._pushes.pop(rng.randrange(len(self._pushes)))
            ledger.release(holder)
        elif kind == "forget" and rng.random() < 0.1:
            rng.choice(self.ledgers).evict_cached()
        elif self._requests:
            request = rng.choice(self._requests)
            if kind == "compute":
                request.compute(rng.choice((5, LONGEST)))
            elif kind == "push":
                holder = Holder(HoldKind.PUSHING, self._name())
                request.ledger.share(holder, request.blocks[: request.computed])
                self._pushes.append((request.ledger, holder))
            elif kind == "end":
                self._requests.remove(request)
                request.ledger.release(request.holder)

    def check(self) -> None:
        """Every lookup claims exactly the leading blocks that the worker would find, and no worker has a hole."""
        for prompt in PROMPTS:
            held = {f"w{n}": len(ledger.match(prompt)) for n, ledger in enumerate(self.ledgers)}
            claimed = self.table.lookup(prompt)
            assert claimed == {worker: depth for worker, depth in held.items() if depth}
            self.claims += len(claimed)
            for ledger in self.ledgers:
                findable = [ledger.is_findable(block) for block in prompt]
                assert findable == sorted(findable, reverse=True)
        for request in self._requests:
            known = [request.ledger.lookup(block) for block in request.prompt[: request.computed]]
            assert None not in known
            self.twins += known != request.blocks[: request.computed]

    def _name(self) -> str:
        self._names += 1
        return str(self._names)


@pytest.mark.parametrize("seed", range(10))
def test_no_lookup_claims_more_than_a_worker_finds(seed: int) -> None:
    workers = Workers(random.Random(seed))
    for _ in range(STEPS):
        workers.step()
        workers.check()
    for ledger in workers.ledgers:
        ledger.check_integrity()
    assert workers.claims > STEPS
    assert workers.twins > 0, "requests overlapped"
