"""A wait for a condition returns its value, or names the condition that did not come."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tools.waiting import wait_for, wait_for_async


def never() -> int:
    return 0


def counting() -> Iterator[int]:
    yield from (0, 0, 3)


def test_what_came_is_returned() -> None:
    counts = counting()
    assert wait_for(lambda: next(counts)) == 3
    counts = counting()
    assert asyncio.run(wait_for_async(lambda: next(counts))) == 3

    async def look() -> int:
        return next(counts)

    counts = counting()
    assert asyncio.run(wait_for_async(look)) == 3


def test_what_did_not_come_is_named() -> None:
    with pytest.raises(AssertionError, match="the moon is full: not within 0 s"):
        wait_for(never, 0, "the moon is full")
    with pytest.raises(AssertionError, match=r"^never: not within 0 s"):
        wait_for(never, 0)
    with pytest.raises(AssertionError, match=r"lambda: never\(\) == 5.*: not within 0 s"):
        wait_for(lambda: never() == 5, 0)
    with pytest.raises(AssertionError, match=r"^never: not within 0 s"):
        asyncio.run(wait_for_async(never, 0))


def test_a_look_that_hangs_is_ended() -> None:
    async def run() -> None:
        forever = asyncio.Event()
        await wait_for_async(forever.wait, 0, "it hangs")

    with pytest.raises(AssertionError, match="it hangs"):
        asyncio.run(run())
