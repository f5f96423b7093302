"""Budgets of tenants: asked, settled, and kept by the router itself while Redis is away."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.clock import ManualClock
from tandem.core.config import BudgetSection
from tandem.core.errors import RateLimitError, UnavailableError
from tandem.router.tenancy.budgets import AWAY_S, Budgets, LocalBucket
from tandem.statestore.stores.budgets import BURST_S, Charge

SIXTY = BudgetSection(requests_per_minute=60)
TOKENS = BudgetSection(tokens_per_minute=6000)


class Books:
    """Redis, as far as a router knows it; `failure` is raised in place of an answer."""

    def __init__(self) -> None:
        self.charges: list[tuple[str, Charge]] = []
        self.wait_s = 0.0
        self.failure: Exception | None = None

    async def spend(self, tenant: str, budget: BudgetSection, charge: Charge) -> float:
        self.charges.append((tenant, charge))
        if self.failure is not None:
            raise self.failure
        return self.wait_s


def made(books: Books | None, **budgets: BudgetSection) -> tuple[Budgets, ManualClock, list[str]]:
    clock, reasons = ManualClock(10.0), list[str]()
    return (
        Budgets({name.replace("others", "*"): one for name, one in budgets.items()}, books, clock, reasons.append),
        clock,
        reasons,
    )


async def test_who_has_no_budget_is_never_asked_about() -> None:
    books = Books()
    budgets, _, _ = made(books, acme=SIXTY, free=BudgetSection())
    await budgets.spend("nobody", 10**9)
    await budgets.spend("free", 10**9)
    budgets.settle("free", charged=5, used=1, is_served=True)
    await budgets.flush()
    assert books.charges == []


async def test_a_spent_budget_says_when_to_come_back() -> None:
    books = Books()
    budgets, _, reasons = made(books, acme=BudgetSection(requests_per_minute=60, tokens_per_minute=1000))
    await budgets.spend("acme", 40)
    books.wait_s = 2.5
    with pytest.raises(RateLimitError, match="60 requests and 1000 tokens a minute") as caught:
        await budgets.spend("acme", 40)
    assert (caught.value.retry_after_s, reasons) == (2.5, ["budget"])
    assert books.charges[0] == ("acme", Charge(requests=1, tokens=40))


async def test_everybody_else_has_a_budget_each() -> None:
    books = Books()
    budgets, _, _ = made(books, others=SIXTY)
    await budgets.spend("one", 1)
    await budgets.spend("two", 1)
    assert [tenant for tenant, _ in books.charges] == ["one", "two"]


async def test_what_was_used_is_settled_together_and_what_was_not_served_is_given_back() -> None:
    books = Books()
    budgets, _, _ = made(books, acme=TOKENS)
    budgets.settle("acme", charged=100, used=350, is_served=True)
    budgets.settle("acme", charged=100, used=0, is_served=False)
    task = asyncio.create_task(budgets.run())
    async with asyncio.timeout(5):
        while not books.charges:
            await asyncio.sleep(0.01)
    task.cancel()
    assert books.charges == [("acme", Charge(requests=-1, tokens=150, is_asked=False))]


@pytest.mark.parametrize("failure", [UnavailableError("gone"), TimeoutError()])
async def test_without_redis_a_router_keeps_its_own_books_and_asks_again_later(failure: Exception) -> None:
    books = Books()
    books.failure = failure
    budgets, clock, _ = made(books, acme=SIXTY)
    for _ in range(int(BURST_S)):
        await budgets.spend("acme", 1)
    with pytest.raises(RateLimitError):
        await budgets.spend("acme", 1)
    assert len(books.charges) == 1
    clock.advance(AWAY_S)
    books.failure = None
    await budgets.spend("acme", 1)
    assert len(books.charges) == 2


async def test_what_redis_did_not_take_is_settled_there_once_it_is_back() -> None:
    books = Books()
    budgets, clock, _ = made(books, acme=TOKENS)
    for _ in range(3):
        await budgets.spend("acme", 100)
    books.failure, books.charges = UnavailableError("gone"), []
    budgets.settle("acme", charged=100, used=10, is_served=True)
    await budgets.flush()
    budgets.settle("acme", charged=100, used=0, is_served=False)
    await budgets.flush()
    assert len(books.charges) == 1, "it is left alone for a while"
    books.failure, books.charges = None, []
    clock.advance(AWAY_S)
    await budgets.spend("acme", 7)
    budgets.settle("acme", charged=100, used=20, is_served=True)
    await budgets.flush()
    await budgets.flush()
    assert books.charges == [
        ("acme", Charge(requests=1, tokens=7)),
        ("acme", Charge(requests=-1, tokens=-270, is_asked=False)),
    ]


async def test_while_redis_is_away_an_answer_counts_once_here_however_often_it_is_offered_there() -> None:
    books = Books()
    books.failure = UnavailableError("gone")
    budgets, _, _ = made(books, acme=SIXTY)
    for _ in range(int(BURST_S)):
        await budgets.spend("acme", 1)
    budgets.settle("acme", charged=1, used=0, is_served=False)
    for _ in range(5):
        await budgets.flush()
    await budgets.spend("acme", 1)
    with pytest.raises(RateLimitError):
        await budgets.spend("acme", 1)


async def test_what_redis_perhaps_took_is_not_said_again() -> None:
    books = Books()
    budgets, clock, _ = made(books, acme=TOKENS)
    await budgets.spend("acme", 100)
    books.failure, books.charges = TimeoutError(), []
    budgets.settle("acme", charged=100, used=10, is_served=True)
    await budgets.flush()
    clock.advance(AWAY_S)
    books.failure = None
    await budgets.flush()
    assert books.charges == [("acme", Charge(requests=0, tokens=-90, is_asked=False))]


async def test_without_redis_what_is_given_back_is_there_again() -> None:
    budgets, _, _ = made(None, acme=SIXTY)
    for _ in range(int(BURST_S)):
        await budgets.spend("acme", 1)
    budgets.settle("acme", charged=1, used=0, is_served=False)
    await budgets.flush()
    await budgets.spend("acme", 1)
    with pytest.raises(RateLimitError):
        await budgets.spend("acme", 1)


def test_a_bucket_of_tokens_lets_a_long_request_leave_a_debt() -> None:
    bucket = LocalBucket(TOKENS, 0.0)
    assert bucket.spend(Charge(requests=1, tokens=3000), 0.0) == 0
    assert bucket.spend(Charge(requests=1, tokens=1), 0.0) == pytest.approx(20.01)
    assert bucket.spend(Charge(requests=1, tokens=1), 20.02) == 0


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(1, 5000)), min_size=1, max_size=60))
def test_a_bucket_never_gives_more_than_its_rate_its_burst_and_one_request(steps: list[tuple[float, int]]) -> None:
    bucket, now_s, taken, largest = LocalBucket(TOKENS, 0.0), 0.0, 0, 0
    for passed_s, tokens in steps:
        now_s += passed_s
        wait_s = bucket.spend(Charge(requests=1, tokens=tokens), now_s)
        if wait_s == 0:
            taken, largest = taken + tokens, max(largest, tokens)
        assert taken <= 100 * (now_s + BURST_S) + largest
        assert wait_s >= 0


def test_what_is_given_back_does_not_fill_a_bucket_over() -> None:
    bucket = LocalBucket(SIXTY, 0.0)
    bucket.spend(Charge(requests=-1000, tokens=0, is_asked=False), 0.0)
    allowed = 0
    while bucket.spend(Charge(requests=1, tokens=0), 1.0) == 0:
        allowed += 1
    assert allowed == BURST_S
