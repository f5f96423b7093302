"""Places: handed out in turn, taken back from the youngest, never lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tandem.router.storage.batches.concurrency import BatchSlot, RevokedError, Slots


def run(scenario: Callable[[Slots], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario(Slots()))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_in_turn() -> None:
    async def scenario(slots: Slots) -> None:
        order: list[str] = []

        async def batch(name: str) -> None:
            for _ in range(3):
                slot = await slots.take("t", 1)
                order.append(name)
                await asyncio.sleep(0)
                slots.give_back(slot)

        async with asyncio.TaskGroup() as group:
            for name in "ab":
                group.create_task(batch(name))
            await settle()
            assert not order
            slots.allow(1)
        assert order == ["a", "b"] * 3
        assert slots.running == 0

    run(scenario)


def test_who_asks_more_often_gets_no_more() -> None:
    """Seven times as many of one tenant as of another's: each tenant has half of the places."""

    async def scenario(slots: Slots) -> None:
        begun = Counter[str]()

        async def batch(tenant: str) -> None:
            while begun.total() < 300:
                slot = await slots.take(tenant, 200)
                begun[tenant] += 1
                await asyncio.sleep(0)
                slots.give_back(slot)

        async with asyncio.TaskGroup() as group:
            for tenant in "a" * 28 + "b" * 4:
                group.create_task(batch(tenant))
            await settle()
            slots.allow(2)
        assert min(begun.values()) > 0.4 * begun.total(), begun

    run(scenario)


def test_the_youngest_is_taken_back() -> None:
    async def scenario(slots: Slots) -> None:
        slots.allow(2)
        taken = [await slots.take("t", 1), await slots.take("t", 1)]
        work = [asyncio.create_task(slot.run(asyncio.Event().wait())) for slot in taken]
        await settle()
        slots.allow(1)
        with pytest.raises(RevokedError):
            await work[1]
        assert not work[0].done()
        work[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await work[0]

    run(scenario)


def test_taken_back_before_its_work_began() -> None:
    async def scenario(slots: Slots) -> None:
        slots.allow(1)
        slot = await slots.take("t", 1)
        slots.allow(0)
        with pytest.raises(RevokedError):
            await slot.run(asyncio.Event().wait())
        slots.give_back(slot)
        assert slots.running == 0

    run(scenario)


def test_what_fails_and_what_ends_in_a_place() -> None:
    async def scenario(slots: Slots) -> None:
        async def fail() -> None:
            raise OSError("no")

        async def answer() -> int:
            return 7

        slot = BatchSlot()
        assert await slot.run(answer()) == 7
        with pytest.raises(OSError, match="no"):
            await slot.run(fail())

    run(scenario)


def test_who_leaves_the_queue_takes_no_place_along() -> None:
    async def scenario(slots: Slots) -> None:
        first = asyncio.create_task(slots.take("t", 1))
        second = asyncio.create_task(slots.take("t", 1))
        await settle()
        slots.allow(1)  # the first has been given its place, and leaves before it notices
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert isinstance(await second, BatchSlot)
        assert slots.running == 1
        third = asyncio.create_task(slots.take("t", 1))
        await settle()
        third.cancel()
        await settle()
        slots.allow(9)
        assert slots.running == 1

    run(scenario)
