"""The fair queue: bounded, fair within a quantum and one request, no starvation, a removed entry leaves nothing."""

import math
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tandem.router.admission.fair_queue import FairQueue, Waiting

QUANTUM = 100
COSTS = st.integers(1, 5000)


def one(tenant: str, cost: int = 1, due_s: float = 0.0, gone_s: float = math.inf) -> Waiting:
    return Waiting(tenant=tenant, cost=cost, due_s=due_s, gone_s=gone_s)


def taken(queue: FairQueue[Waiting]) -> Waiting:
    first = queue.first()
    assert first is not None
    queue.take(first)
    return first


def test_a_tenants_own_go_by_due_time_then_as_they_came() -> None:
    queue = FairQueue[Waiting](quantum=QUANTUM, limit=10)
    came = [one("a", due_s=due_s) for due_s in (3.0, 1.0, 2.0, 1.0)]
    for each in came:
        assert queue.add(each) is None
    assert [taken(queue) for _ in came] == [came[1], came[3], came[2], came[0]]
    assert queue.first() is None


@given(st.lists(st.lists(COSTS, min_size=1, max_size=40), min_size=2, max_size=5), st.integers(0, 200))
def test_shares_differ_by_a_quantum_and_one_request(tenants: list[list[int]], sent: int) -> None:
    """Of tenants that always have something waiting."""
    queue = FairQueue[Waiting](quantum=QUANTUM, limit=10_000)
    for tenant, costs in enumerate(tenants):
        for cost in costs:
            queue.add(one(str(tenant), cost))
    got: dict[str, int] = defaultdict(int)
    largest = max(cost for costs in tenants for cost in costs)
    for _ in range(sent):
        waiting = {each.tenant for each in queue}
        if len(waiting) < len(tenants):
            break
        shares = [got[str(tenant)] for tenant in range(len(tenants))]
        assert max(shares) - min(shares) <= QUANTUM + largest
        first = taken(queue)
        got[first.tenant] += first.cost


@given(st.lists(COSTS, min_size=1, max_size=20), st.integers(1, 6), COSTS, st.integers(0, 3000))
def test_nobody_starves(ahead: list[int], others: int, cost: int, savings: int) -> None:
    """However much others send, and go on sending, a request waits for no more than rounds for its own cost, and for
    what they had saved."""
    queue = FairQueue[Waiting](quantum=QUANTUM, limit=10_000, savings=savings)
    for tenant in range(others):
        for each in ahead:
            queue.add(one(f"other {tenant}", each))
    mine = one("mine", cost)
    queue.add(mine)
    rounds = math.ceil(cost / QUANTUM) + 1
    bound = others * (savings + rounds * QUANTUM + max(ahead))
    spent = 0
    while (first := taken(queue)) is not mine:
        spent += first.cost
        queue.add(one(first.tenant, first.cost))
        assert spent <= bound


def flooded(savings: int) -> FairQueue[Waiting]:
    """One tenant has had its turns for long, and has much waiting."""
    queue = FairQueue[Waiting](quantum=QUANTUM, limit=10_000, savings=savings)
    for _ in range(100):
        queue.add(one("greedy", 100))
    for _ in range(50):
        taken(queue)
    return queue


def next_tenants(queue: FairQueue[Waiting], count: int) -> str:
    return "".join(taken(queue).tenant[0] for _ in range(count))


def test_who_comes_with_savings_is_next_until_they_are_spent() -> None:
    queue = flooded(savings=300)
    assert queue.first() is not None
    for _ in range(6):
        queue.add(one("modest", 100))
    assert next_tenants(queue, 9) == "mmm" + "gmgmgm"
    queue.check()


def test_who_saved_less_than_its_first_one_costs_waits_for_its_turn() -> None:
    queue = flooded(savings=90)
    assert queue.first() is not None
    queue.add(one("modest", 100))
    assert next_tenants(queue, 2) == "gm"


@pytest.mark.parametrize("others", range(1, 8))
def test_what_was_spent_is_saved_again_while_others_have_their_turns(others: int) -> None:
    queue = flooded(savings=300)
    for _ in range(3):
        queue.add(one("modest", 100))
    assert next_tenants(queue, 3) == "mmm"
    assert next_tenants(queue, others) == "g" * others
    for _ in range(9):
        queue.add(one("modest", 100))
    at_once = next_tenants(queue, 9).index("g")
    assert min(3, others) <= at_once <= min(3, others) + 1, "saved, and perhaps a turn of its own"


def test_leaving_the_queue_and_coming_back_earns_nothing() -> None:
    """A tenant that always comes back at once has its share and no more."""
    queue = flooded(savings=300)
    order = ""
    for _ in range(20):
        if "modest" not in {each.tenant for each in queue}:
            queue.add(one("modest", 100))
        order += next_tenants(queue, 1)
    assert order.count("m") <= 3 + 10


def test_after_a_long_calm_everybody_is_as_new() -> None:
    queue = flooded(savings=300)
    for _ in range(3):
        queue.add(one("modest", 100))
    assert next_tenants(queue, 3) == "mmm"
    queue.forget()
    queue.add(one("modest", 100))
    assert next_tenants(queue, 1) == "m"


def test_the_cost_before_a_new_one_counts_savings() -> None:
    queue = flooded(savings=300)
    for _ in range(10):
        queue.add(one("modest", 100, due_s=1.0))
    assert queue.cost_before("modest", 0.0) <= QUANTUM
    assert queue.cost_before("greedy", -1.0) >= 300
    assert queue.cost_before("modest", 1.0) <= 1000 + (1000 - 300) + 2 * QUANTUM


def test_who_is_due_before_may_pass_on_credit() -> None:
    queue = FairQueue[Waiting](quantum=QUANTUM, limit=20, credit=100)
    queue.add(one("long", 50, due_s=9.0))
    for _ in range(5):
        queue.add(one("short", 40, due_s=1.0))
    queue.add(one("later", 10, due_s=9.5))
    queue.add(one("large", 101, due_s=1.0))
    first = queue.first()
    assert first is not None
    assert first.tenant == "long"
    passed = []
    while found := queue.passing(5):
        assert queue.first() is first
        passed.append(found[0].tenant)
        queue.take(found[0])
    assert passed == ["short", "short"], "80 of 100"
    assert queue.passing(0) == []
    queue.check()


def test_what_costs_far_more_than_a_quantum_is_found_at_once() -> None:
    queue = FairQueue[Waiting](quantum=1, limit=10)
    for tenant in "abc":
        queue.add(one(tenant, 10**12))
    assert len({taken(queue).tenant for _ in range(3)}) == 3


def test_the_tenant_with_most_waiting_pays_for_a_full_queue() -> None:
    queue = FairQueue[Waiting](quantum=QUANTUM, limit=3)
    first, last = one("greedy", 10, due_s=1.0), one("greedy", 10, due_s=2.0)
    for each in (last, first, one("modest", 5)):
        assert queue.add(each) is None
    assert queue.add(one("new", 5)) is last
    newcomer = one("greedy", 10, due_s=3.0)
    assert queue.add(newcomer) is newcomer
    assert len(queue) == 3
    queue.check()


def test_the_cost_before_a_new_one() -> None:
    queue = FairQueue[Waiting](quantum=QUANTUM, limit=100)
    for _ in range(10):
        queue.add(one("a", 1000, due_s=5.0))
    assert queue.cost_before("b", 1.0) == QUANTUM
    assert queue.cost_before("a", 1.0) == 0
    assert queue.cost_before("a", 9.0) == 10_000
    queue.add(one("b", 300, due_s=0.0))
    assert queue.cost_before("b", 1.0) == 300 + (300 + QUANTUM)


class FairQueueMachine(RuleBasedStateMachine):
    """Against a plain list: nothing is lost, nothing is there twice, the bound holds."""

    LIMIT = 12

    def __init__(self) -> None:
        super().__init__()
        self.queue = FairQueue[Waiting](quantum=QUANTUM, limit=self.LIMIT, credit=2500, savings=1500)
        self.model: list[Waiting] = []

    @rule(tenant=st.sampled_from("abcd"), cost=COSTS, due=st.integers(0, 5), gone=st.integers(0, 5))
    def add(self, tenant: str, cost: int, due: int, gone: int) -> None:
        new = one(tenant, cost, float(due), float(gone))
        self.model.append(new)
        loser = self.queue.add(new)
        assert (loser is None) == (len(self.model) <= self.LIMIT)
        if loser is not None:
            most: dict[str, int] = defaultdict(int)
            for each in self.model:
                most[each.tenant] += each.cost
            assert most[loser.tenant] == max(most.values())
            self.model.remove(loser)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        gone = data.draw(st.sampled_from(self.model))
        assert self.queue.remove(gone)
        assert not self.queue.remove(gone)
        self.model.remove(gone)

    @precondition(lambda self: self.model)
    @rule()
    def take(self) -> None:
        first = self.queue.first()
        assert first is not None
        assert self.queue.first() is first
        own = [each for each in self.model if each.tenant == first.tenant]
        assert first == min(own)
        self.queue.take(first)
        self.model.remove(first)

    @precondition(lambda self: self.model)
    @rule()
    def let_one_pass(self) -> None:
        first, passing = self.queue.first(), self.queue.passing(2)
        for one in passing:
            assert first is not None
            assert one < first
        if passing:
            self.queue.take(passing[-1])
            self.model.remove(passing[-1])

    @rule(now=st.integers(0, 6))
    def expire(self, now: int) -> None:
        assert set(self.queue.expired(float(now))) == {each for each in self.model if each.gone_s <= now}

    @invariant()
    def same_as_the_model(self) -> None:
        self.queue.check()
        assert set(self.queue) == set(self.model)
        assert len(self.queue) == len(self.model)
        if not self.model:
            assert self.queue.first() is None


TestFairQueueMachine = FairQueueMachine.TestCase


def test_the_books_are_checked() -> None:
    queue = FairQueue[Waiting](quantum=QUANTUM, limit=3)
    queue.add(one("a", 5))
    next(iter(queue)).cost = 6
    with pytest.raises(RuntimeError, match="the line of a is wrong"):
        queue.check()
