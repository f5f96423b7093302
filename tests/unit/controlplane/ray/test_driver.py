"""How a worker ended, as its driver reports it: by itself, or because what it ran in is gone."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, NodeDiedError, RayTaskError

from tandem.controlplane.ray import driver, placement
from tandem.controlplane.ray.driver import Following
from tandem.controlplane.ray.messages import DriverConfig, Order
from tandem.controlplane.ray.placement import NoPlaceError, WorkerPlacement
from tests.unit.controlplane.ray.orders_rig import ORDER

CONFIG = DriverConfig(cluster="c", address="", secret_file="", place_timeout_s=1.0)
RAISED = RayTaskError("listen", "Traceback of the agent", ValueError("of another release"))


class Ref:
    """The answer of an agent to a call; None = it never comes."""

    def __init__(self, answer: list[str] | BaseException | None) -> None:
        self._answer: Future[list[str]] = Future()
        if isinstance(answer, BaseException):
            self._answer.set_exception(answer)
        elif answer is not None:
            self._answer.set_result(answer)

    def future(self) -> Future[list[str]]:
        return self._answer


def ended(monkeypatch: pytest.MonkeyPatch, answer: list[str] | BaseException | None) -> dict[str, Any]:
    """Return the last report of a running worker, from an agent that answers so."""
    place = WorkerPlacement("c:w:1", None, SimpleNamespace(listen=SimpleNamespace(remote=lambda *_: Ref(answer))))
    said: list[dict[str, Any]] = []

    async def find(prefix: str, wanted: str | None) -> WorkerPlacement:
        return place

    async def leave(self: WorkerPlacement) -> None:
        said.append({"left": self.name})

    monkeypatch.setattr(placement, "find", find)
    monkeypatch.setattr(WorkerPlacement, "leave", leave)
    asyncio.run(Following("w", ORDER, b"", CONFIG, lambda **report: said.append(report)).run(0))
    assert said[0] == {"left": "c:w:1"}
    assert len(said) == 2
    return said[1]


@pytest.mark.parametrize(
    "died", [ActorDiedError(), NodeDiedError("its node is gone")], ids=lambda error: type(error).__name__
)
def test_an_agent_that_died_is_a_lost_place(monkeypatch: pytest.MonkeyPatch, died: BaseException) -> None:
    said = ended(monkeypatch, died)
    assert (said["is_place_lost"], said["is_unplaced"]) == (True, False)


def test_so_is_an_agent_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_SILENCE_S", 0.0)
    said = ended(monkeypatch, None)
    assert said == {"exited": "its agent has not answered for 0 s", "is_unplaced": False, "is_place_lost": True}


def test_a_worker_that_ended_by_itself_lost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    said = ended(monkeypatch, ['{"exited": "exit code 1"}'])
    assert said == {"exited": "exit code 1", "is_unplaced": False, "is_place_lost": False}


def test_a_worker_whose_gpus_somebody_holds_has_found_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    said = ended(monkeypatch, ['{"exited": "GPU 0 has no room", "is_unplaced": true}'])
    assert said == {"exited": "GPU 0 has no room", "is_unplaced": True, "is_place_lost": False}


@pytest.mark.parametrize("error", [RAISED, ActorDiedError(RAISED)], ids=["in a call", "when it was created"])
def test_what_an_agent_raises_it_would_raise_elsewhere_too(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    said = ended(monkeypatch, error)
    assert (said["is_place_lost"], said["is_unplaced"]) == (False, False)


def test_who_got_no_place_has_lost_none(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[dict[str, Any]] = []

    async def find(prefix: str, wanted: str | None) -> None:
        return None

    async def take(prefix: str, order: Order, *_: object) -> None:
        raise NoPlaceError("it got no place within 1 s")

    monkeypatch.setattr(placement, "find", find)
    monkeypatch.setattr(placement, "take", take)
    asyncio.run(Following("w", ORDER, b"", CONFIG, lambda **report: said.append(report)).run(0))
    assert said == [{"exited": "it got no place within 1 s", "is_unplaced": True, "is_place_lost": False}]


def test_an_agent_of_an_older_release_that_lacks_a_method_answers_nothing() -> None:
    """As with the handle of a real agent, what it lacks is no attribute."""
    assert asyncio.run(WorkerPlacement("c:w:1", None, SimpleNamespace()).asked("order")) is None
