"""Frame of the programs: where the two servers are, what their functions look like, and how features are run.

Each program runs in the environment of `make clients`, which has no Tandem: `python -m tests.e2e.clients.NAME`.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

SCRIPTED = os.environ["SCRIPTED_URL"]
"""A router whose model, "scripted", answers by `scenes`."""
CLUSTER = os.environ["CLUSTER_URL"]
"""A whole cluster with a real, tiny model, "tools": grammars alone give its answers a form."""
KEY = "none"
PASSED = "passed: "
TIMEOUT_S = 60.0

GIVEN: list[tuple[str, int]] = []
"""Arguments of every call of `get_weather`."""
FOUND = "21°, sunny"


def get_weather(city: str, days: int) -> str:
    """Forecast the weather of a town.

    Args:
        city: Name of the town.
        days: Number of days.
    """
    GIVEN.append((city, days))
    return FOUND


class Report(BaseModel):
    """A report about the weather."""

    city: str
    degrees: int


class Wind(BaseModel):
    """Direction of the wind."""

    model_config = ConfigDict(extra="forbid")

    direction: Literal["north", "south"]


class Forecast(BaseModel):
    """A forecast of values that are listed, since some clients leave bounds out of the schemas that they send."""

    model_config = ConfigDict(extra="forbid")

    sky: Literal["clear", "cloudy"] = Field(description="State of the sky")
    days: Literal[1, 2, 3]
    wind: Wind


def was_asked(*expected: tuple[str, int]) -> None:
    """Hold the calls of `get_weather` since the last time against those that are expected, in any order: some clients
    make those of one answer at the same time."""
    assert sorted(GIVEN) == sorted(expected), GIVEN
    GIVEN.clear()


Refusal = TypeVar("Refusal", bound=Exception)


def refusal(expected: type[Refusal], asked: Callable[..., Any], **ask: Any) -> Refusal:
    """Return the error of this type that a request has to raise."""
    try:
        asked(**ask)
    except expected as error:
        return error
    raise AssertionError(f"{ask} was not refused")


def run(*features: Callable[[], Any]) -> None:
    """Run each feature, a coroutine function or a plain one, and print its name behind PASSED at its end."""
    for feature in features:
        done = feature()
        if inspect.iscoroutine(done):
            asyncio.run(done)
        assert not GIVEN, f"{feature.__name__} leaves calls that it did not look at"
        print(f"{PASSED}{feature.__name__.replace('_', ' ')}", flush=True)
