"""Test workers in Ray: orders, the driver, tokens, placement and what is missing."""

import asyncio
import dataclasses
import sys
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, NodeDiedError, RayTaskError

from tandem.controlplane.environment import Environment
from tandem.controlplane.open_launcher import opened
from tandem.controlplane.ray import driver, placement
from tandem.controlplane.ray.driver import Following
from tandem.controlplane.ray.launcher import check_installed
from tandem.controlplane.ray.messages import HARDWARE_LABEL, DriverConfig, Order, PlacedOrder, from_json, to_json
from tandem.controlplane.ray.placement import NoPlaceError, WorkerPlacement
from tandem.controlplane.ray.ray_env import ray_variables, without_ray
from tandem.controlplane.ray.unschedulable import RayNodeResources, shortage
from tandem.controlplane.state_dir import StateDir
from tandem.core.config import ClusterConfig, LauncherName, WorkerSection
from tandem.core.errors import ConfigError, StartupError
from tandem.core.state_enums import RoleName
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


MISSING = (
    r"^Ray is not installed: --launcher ray needs it.* Install it with `pip install 'tandem-serve\[ray\]'`, on every"
)


def test_a_ray_that_is_there_is_nothing_to_speak_of() -> None:
    check_installed()


def test_a_cluster_that_asks_for_ray_where_it_is_missing_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    environment = Environment(state_root=tmp_path, socket_root=tmp_path, cores=1, variables={})
    config, said = ClusterConfig(launcher=LauncherName.RAY), list[str]()

    async def run() -> None:
        with StateDir(tmp_path, "test").hold() as held:
            async with opened(
                config, held, environment, command=(), hurry=asyncio.Event(), say=lambda part, text: said.append(text)
            ):
                pass

    with pytest.raises(StartupError, match=MISSING):
        asyncio.run(run())
    assert said == []


def test_a_charge_comes_back_whole_from_one_line() -> None:
    charge = PlacedOrder(order=ORDER, gpus=("0", "GPU-b"), controller_ip="10.0.0.1")
    text = to_json(charge)
    assert "\n" not in text
    assert from_json(text, PlacedOrder) == charge


@pytest.mark.parametrize("text", ['{"order": 1}', "[1]", "None", ""])
def test_what_is_no_charge_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="order"):
        from_json(text, PlacedOrder)


def test_any_difference_makes_another_digest() -> None:
    others = [
        dataclasses.replace(ORDER, threads=3),
        dataclasses.replace(ORDER, hardware="h100"),
        dataclasses.replace(ORDER, config=dataclasses.replace(ORDER.config, role=RoleName.DECODE)),
        dataclasses.replace(ORDER, config=dataclasses.replace(ORDER.config, settings=WorkerSection(tp=2))),
    ]
    assert len({ORDER.digest, *(other.digest for other in others)}) == 5
    assert dataclasses.replace(ORDER).digest == ORDER.digest


AROUND = {"PATH": "/bin", "RAY_AUTH_TOKEN": "theirs", "RAY_ADDRESS": "elsewhere:1", "RAY_AUTH_MODE": "disabled"}


def test_a_token_file_turns_tokens_on() -> None:
    made = ray_variables(AROUND, "/s/ray.token")
    assert made["RAY_AUTH_MODE"] == "token"
    assert made["RAY_AUTH_TOKEN_PATH"] == "/s/ray.token"
    assert made["PATH"] == "/bin"
    assert not {"RAY_AUTH_TOKEN", "RAY_ADDRESS"} & made.keys()


def test_without_one_they_are_off_and_not_guessed() -> None:
    made = ray_variables({**AROUND, "RAY_AUTH_MODE": "token"}, "")
    assert made["RAY_AUTH_MODE"] == "disabled"
    assert "RAY_AUTH_TOKEN_PATH" not in made


def test_tls_is_for_those_who_run_it_to_turn_on() -> None:
    tls = {"RAY_USE_TLS": "1", "RAY_TLS_SERVER_CERT": "/s/a.crt", "RAY_TLS_SERVER_KEY": "/s/a.key"}
    assert ray_variables({**AROUND, **tls, "RAY_TLSX": "1"}, "") == {**ray_variables(AROUND, ""), **tls}


def test_nothing_of_ray_reaches_a_worker() -> None:
    assert without_ray(ray_variables({**AROUND, "RAY_USE_TLS": "1"}, "/s/ray.token")) == {
        "PATH": "/bin",
        "PYTHONUNBUFFERED": "1",
    }


def node(
    address: str, hardware: str = "", *, free: dict[str, float], total: dict[str, float] | None = None
) -> RayNodeResources:
    labels = {HARDWARE_LABEL: hardware} if hardware else {}
    return RayNodeResources(address=address, labels=labels, total=total or free, free=free)


FULL = node("a", free={"CPU": 4.0})
BUSY = node("b", "h100", free={"CPU": 1.0, "GPU": 1.0}, total={"CPU": 8.0, "GPU": 4.0})


@pytest.mark.parametrize(
    ("nodes", "needs", "hardware", "said"),
    [
        ([], {"CPU": 1.0}, "any", "no node has joined"),
        ([FULL], {"CPU": 4.0}, "any", ""),
        ([FULL, BUSY], {"CPU": 2.0}, "any", ""),
        ([FULL], {"CPU": 1.0}, "h100", "no node of class h100 (there are: any on a)"),
        ([FULL], {"CPU": 8.0}, "any", "needs 8 CPU on one node: a has 4 of 4 CPU free"),
        ([FULL], {"CPU": 1.0, "GPU": 2.0}, "any", "needs 1 CPU, 2 GPU on one node: a has no GPU"),
        (
            [FULL, BUSY],
            {"CPU": 2.0, "GPU": 2.0},
            "h100",
            "needs 2 CPU, 2 GPU on one node of class h100: b has 1 of 8 CPU free, 1 of 4 GPU free",
        ),
        ([FULL, BUSY], {"GPU": 2.0}, "any", "needs 2 GPU on one node: a has no GPU; b has 1 of 4 GPU free"),
    ],
)
def test_what_is_missing_is_named(
    nodes: list[RayNodeResources], needs: dict[str, float], hardware: str, said: str
) -> None:
    assert shortage(nodes, needs, hardware) == said
