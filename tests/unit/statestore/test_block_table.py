"""Test the table of blocks and claims."""

import hashlib
import itertools
import random
import sys
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from tandem.core.block_hash import BlockHash
from tandem.core.ids import BlockId, GroupId, WorkerId
from tandem.core.ledger import BlockLedger, Holder, HoldKind
from tandem.statestore.index import block_table
from tandem.statestore.index.block_table import FIRST_BYTES, BlockTable, Shards

ROOM_BYTES = 1 << 26


def block(number: int) -> BlockHash:
    return BlockHash(hashlib.sha256(b"%d" % number).digest()[:16])


def blocks(numbers: list[int], group: int = 0) -> list[tuple[int, BlockHash]]:
    return [(group, block(n)) for n in numbers]


class TableMachine(RuleBasedStateMachine):
    """Slots open, fill, go live, change, close and are swept in any order; lookups agree with the model throughout."""

    slots = Bundle("slots")

    def __init__(self) -> None:
        super().__init__()
        self.table = BlockTable(ROOM_BYTES)
        self.model: dict[int, set[tuple[int, BlockHash]]] = {}
        self.live: dict[int, WorkerId] = {}
        self.names = 0

    @rule(target=slots)
    def open(self) -> int:
        bit = self.table.open_slot()
        assert bit not in self.model
        self.model[bit] = set()
        return bit

    @rule(slot=slots)
    def go_live(self, slot: int) -> None:
        if slot in self.model and slot not in self.live:
            self.names += 1
            self.live[slot] = WorkerId(f"w{self.names}")
            self.table.go_live(slot, self.live[slot])

    @rule(slot=slots, numbers=st.lists(st.integers(0, 12)), group=st.integers(0, 2))
    def add(self, slot: int, numbers: list[int], group: int) -> None:
        self.table.add(slot, blocks(numbers, group))
        self.model[slot] |= set(blocks(numbers, group))

    @rule(slot=slots, numbers=st.lists(st.integers(0, 12)), group=st.integers(0, 2))
    def remove(self, slot: int, numbers: list[int], group: int) -> None:
        self.table.remove(slot, blocks(numbers, group))
        self.model[slot] -= set(blocks(numbers, group))

    @rule(slot=consumes(slots))
    def close(self, slot: int) -> None:
        self.table.close_slot(slot)
        del self.model[slot]
        self.live.pop(slot, None)

    @rule(budget=st.integers(1, 5))
    def sweep(self, budget: int) -> None:
        self.table.sweep(budget)

    @rule(numbers=st.lists(st.integers(0, 12), max_size=8), group=st.integers(0, 2))
    def lookup(self, numbers: list[int], group: int) -> None:
        """Exact for workers that hold no block without those before it; for others, one of their runs is found."""
        found = self.table.lookup([block(n) for n in numbers], group)
        for bit, worker in self.live.items():
            held = [(group, block(n)) in self.model[bit] for n in numbers]
            leading = [*held, False].index(False)
            depth = found.pop(worker, 0)
            assert (depth > 0) is (leading > 0)
            assert depth >= leading
            assert depth == leading if held == sorted(held, reverse=True) else depth == 0 or held[depth - 1]
        assert not found

    @invariant()
    def is_sound(self) -> None:
        self.table.check_integrity()
        for bit, worker in self.live.items():
            assert self.table.blocks_of(worker) == self.model[bit]
        assert self.unique() == {worker: count for worker, count in self.alone().items() if count}

    def unique(self) -> dict[WorkerId, int]:
        counts: Counter[WorkerId] = Counter()
        for part in range(self.table.parts):
            counts.update(self.table.unique_in(part))
        return dict(counts)

    def alone(self) -> dict[WorkerId, int]:
        """Blocks of the first group that no other worker holds in the model."""
        first = {bit: {one for one in self.model[bit] if one[0] == 0} for bit in self.live}
        others = {bit: set().union(*(held for other, held in first.items() if other != bit)) for bit in first}
        return {worker: len(first[bit] - others[bit]) for bit, worker in self.live.items()}

    def teardown(self) -> None:
        while self.table.sweep(1000):
            pass
        self.table.check_integrity()
        assert self.table.entries == len(set().union(*self.model.values()))


TableMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestTable = TableMachine.TestCase


def test_slots_are_reused_after_a_sweep() -> None:
    table = BlockTable(ROOM_BYTES)
    bits = set()
    for round_ in range(50):
        bit = table.open_slot()
        table.add(bit, blocks(list(range(20))))
        table.go_live(bit, WorkerId(f"w{round_}"))
        table.close_slot(bit)
        while table.sweep(7):
            pass
        bits.add(bit)
    assert bits == {1}
    assert table.entries == 0


def test_an_unswept_slot_is_never_handed_out_again() -> None:
    table = BlockTable(ROOM_BYTES)
    first = table.open_slot()
    table.add(first, blocks([1]))
    table.close_slot(first)
    second = table.open_slot()
    table.go_live(second, WorkerId("new"))
    assert second != first
    assert table.lookup([block(1)]) == {}


@pytest.mark.parametrize("groups", [1, 3])
def test_memory_is_bounded_and_the_oldest_go_first(groups: int) -> None:
    table, bound, count = BlockTable(1 << 20), 1 << 20, 40_000
    bit = table.open_slot()
    table.go_live(bit, WorkerId("w"))
    for start in range(0, count, 500):
        table.add(bit, blocks(list(range(start, start + 500)), group=start // 500 % groups))
        assert table.memory_bytes <= 1.25 * bound  # what may be added, and grow, before it is looked at
    assert table.entries + table.evicted == count
    assert 6_000 < table.entries < 12_000
    last = (count - 1) // 500 % groups
    assert table.lookup([block(count - 1)], last) == {"w": 1}
    assert table.lookup([block(0)]) == {}
    table.check_integrity()


def test_memory_is_that_of_dictionaries_hashes_and_masks() -> None:
    """A hash takes what its object takes, in steps of 16 bytes."""
    shards, count = Shards(), 100
    empty = shards.memory_bytes(0)
    assert empty == FIRST_BYTES * sys.getsizeof({})
    for number in range(count):
        shards.of[7][BlockHash(bytes([7, number]) + bytes(14))] = 1
    each, rest = divmod(shards.shard_bytes(7, 0) - sys.getsizeof(shards.of[7]), count)
    assert rest == each % 16 == 0
    assert 0 <= each - sys.getsizeof(bytes(16)) < 16
    assert shards.shard_bytes(7, 36) == shards.shard_bytes(7, 0) + 36 * count
    assert shards.memory_bytes(0) == empty - sys.getsizeof({}) + shards.shard_bytes(7, 0)
    assert len(shards) == count


@pytest.mark.parametrize(("index", "part"), [(0, 7), (5, 12), (15, 14)])
def test_each_dictionary_gives_up_a_part_of_its_own(index: int, part: int) -> None:
    shards = Shards()
    blocks = [BlockHash(bytes([index]) + number.to_bytes(15, "big")) for number in range(100)]
    shards.of[index].update(dict.fromkeys(blocks, 1))
    gone = shards.evict(index)
    assert gone == -(-100 // part)
    assert list(shards.of[index]) == blocks[gone:], "the oldest"
    while shards.evict(index):
        pass
    assert len(shards) == 0


def test_masks_that_are_too_many_to_share_are_paid_for() -> None:
    table = BlockTable(ROOM_BYTES)
    bits = [table.open_slot() for _ in range(40)]
    everything = blocks(list(range(20_000)))
    for number, bit in enumerate(bits):
        table.add(bit, [one for index, one in enumerate(everything) if (index >> number % 16) & 1])
    shared = BlockTable(ROOM_BYTES)
    shared.add(shared.open_slot(), everything[1:])
    assert shared.entries == table.entries
    assert table.memory_bytes >= shared.memory_bytes + 32 * table.entries
    for bit in bits:
        table.remove(bit, everything)
    assert table.entries == 0


@pytest.mark.parametrize(("slots", "mask_bytes"), [(30, 32), (60, 32), (61, 48), (180, 48), (181, 64)])
def test_a_mask_is_paid_for_as_an_integer_of_so_many_bits(
    monkeypatch: pytest.MonkeyPatch, slots: int, mask_bytes: int
) -> None:
    """Integers have four bytes for each 30 bits, and are allocated in steps of 16 bytes."""
    monkeypatch.setattr(block_table, "_MAX_SHARED_MASKS", 1)
    table = BlockTable(ROOM_BYTES)
    bits = [table.open_slot() for _ in range(slots)]
    table.add(bits[-2], blocks([0]))
    table.add(bits[-1], blocks([0]))
    shared = table.memory_bytes
    table.add(bits[-1], [])
    assert table.memory_bytes - shared == mask_bytes
    assert 0 <= mask_bytes - sys.getsizeof((1 << slots) - 1) < 16


def test_memory_is_looked_at_after_each_256_blocks() -> None:
    """Beyond its bound it is for fewer at most, even if one dictionary gets all of them."""
    bound = 1 << 16
    table, empty_bytes = BlockTable(FIRST_BYTES * bound), BlockTable(0).memory_bytes
    bit = table.open_slot()
    for start in range(0, 40 * 256, 256):
        numbers = range(start, start + 256)
        table.add(bit, [(0, BlockHash(bytes([7]) + number.to_bytes(15, "big"))) for number in numbers])
        assert table.memory_bytes <= bound + empty_bytes
    assert table.evicted > 0


def test_a_table_without_entries_to_give_up_ends_its_look() -> None:
    """The same blocks again take no memory, and a bound may be below that of empty dictionaries."""
    table = BlockTable(0)
    bit = table.open_slot()
    table.add(bit, blocks([1] * 1000))
    assert (table.entries, table.evicted) == (0, 1)
    table.check_integrity()


def test_a_call_gives_up_no_more_than_what_it_adds_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor more than a part of a dictionary beyond that, however far that one is past its bound: later calls go on."""
    monkeypatch.setattr(block_table, "_MAX_SHARED_MASKS", 8)
    bound, numbers = 1 << 20, itertools.count()
    table = BlockTable(FIRST_BYTES * bound)
    first, *others = [table.open_slot() for _ in range(5)]

    def add() -> tuple[int, list[BlockHash]]:
        """Add 256 more in one dictionary; return the number evicted for them, and those added."""
        before = table.evicted
        added = [BlockHash(bytes([7]) + next(numbers).to_bytes(15, "big")) for _ in range(256)]
        table.add(first, [(0, one) for one in added])
        return table.evicted - before, added

    while True:
        evicted, newest = add()
        if evicted:
            break
    for position, slot in enumerate(others):  # so many different masks that each entry pays for one from now on
        table.add(slot, [(0, one) for number, one in enumerate(newest[:16]) if number >> position & 1])
    held = table.entries
    evicted, _ = add()
    assert table.memory_bytes > 1.1 * bound + BlockTable(bound).memory_bytes
    assert 0 < evicted < 256 + held // 7
    for _ in range(20):
        add()
    assert table.memory_bytes <= 1.1 * bound + BlockTable(bound).memory_bytes


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda table: table._owners.clear(), "live slots and owners differ"),
        (lambda table: table._owners.update({4: WorkerId("w4")}), "live slots and owners differ"),
        (lambda table: table.go_live(4, WorkerId("w4")), "a live slot is not open"),
        (lambda table: setattr(table, "_dead", 1), "a slot is open and dead"),
        (lambda table: table.add(4, blocks([1])), "an entry has no bit or an unknown one"),
        (lambda table: table._groups[0].of[0].update({bytes([1] * 16): 1}), "a block is in the wrong shard"),
        (lambda table: table._groups[0].of[0].update({bytes(16): 0}), "an entry has no bit or an unknown one"),
    ],
    ids=["no owner", "an owner too many", "not open", "open and dead", "unknown", "another shard", "no bit"],
)
def test_a_table_that_contradicts_itself_is_noticed(damage: Callable[[BlockTable], object], what: str) -> None:
    table = BlockTable(ROOM_BYTES)
    bit = table.open_slot()
    table.add(bit, blocks([1, 2]))
    table.go_live(bit, WorkerId("w"))
    table.check_integrity()
    damage(table)
    with pytest.raises(AssertionError, match=what):
        table.check_integrity()


def test_time_of_a_call_does_not_grow_with_the_table() -> None:
    """Evictions and sweeps touch a part of the table, however much it holds."""
    table = BlockTable(1 << 20)
    bit = table.open_slot()
    evicted = 0
    for start in range(0, 40_000, 500):
        table.add(bit, blocks(list(range(start, start + 500))))
        assert table.evicted - evicted <= table.entries // 4
        evicted = table.evicted
    table.close_slot(bit)
    held, turns = table.entries, 0
    while table.sweep(100):
        turns += 1
        assert held - table.entries <= 100 * turns
    assert table.entries == 0


@given(st.lists(st.integers(0, 130), unique=True, max_size=120), st.integers(1, 16), st.integers(1, 12))
def test_depths_of_many_workers(numbers: list[int], workers: int, step: int) -> None:
    table = BlockTable(ROOM_BYTES)
    hashes = [block(n) for n in numbers]
    for index in range(workers):
        bit = table.open_slot()
        table.go_live(bit, WorkerId(f"w{index}"))
        table.add(bit, [(0, h) for h in hashes[: index * step]])
    depths = {f"w{i}": min(i * step, len(hashes)) for i in range(workers)}
    assert table.lookup(hashes) == {worker: depth for worker, depth in depths.items() if depth}


@pytest.mark.parametrize("count", [1, 15, 16, 17, 33, 64, 500])
def test_depths_in_prompts_of_any_length(count: int) -> None:
    """Around every place that a lookup jumps to."""
    table, hashes = BlockTable(ROOM_BYTES), [block(n) for n in range(count)]
    depths = {f"w{d}": d for d in (1, 2, 14, 15, 16, 17, 18, 31, 32, 33, 48, 63, 64, 65, 250, 499, 500) if d <= count}
    for worker, depth in depths.items():
        bit = table.open_slot()
        table.go_live(bit, WorkerId(worker))
        table.add(bit, [(0, one) for one in hashes[:depth]])
    assert table.lookup(hashes) == depths
    for worker, depth in depths.items():
        assert table.lookup(hashes[:depth])[WorkerId(worker)] == depth
        alone = BlockTable(ROOM_BYTES)
        bit = alone.open_slot()
        alone.go_live(bit, WorkerId("alone"))
        alone.add(bit, [(0, one) for one in hashes[:depth]])
        assert alone.lookup(hashes) == {"alone": depth}


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
