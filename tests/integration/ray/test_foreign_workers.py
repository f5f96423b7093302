"""A worker that another release left is ended, and affects no other. The driver is a program without Ray."""

import json
import sys
from pathlib import Path

import pytest

from tandem.controlplane.environment import Environment
from tandem.controlplane.ray import launcher
from tandem.controlplane.ray.launcher import RayLauncher
from tandem.controlplane.ray.messages import Order, to_json
from tandem.controlplane.state_dir import HeldState
from tools.waiting import wait_for_async

from .test_ray_launcher import D, P, spec

DRIVER = str(Path(__file__).resolve().parent / "foreign_driver.py")


def found(worker: str, order: str) -> str:
    return json.dumps({"worker": worker, "found": order, "place_name": f"tandem:test:{worker}:1"})


async def test_an_order_of_another_release_ends_its_place_and_the_others_are_taken_over(
    held: HeldState, environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = to_json(Order(config=spec(D).config, threads=1))
    foreign = json.dumps({**json.loads(ours), "colour": "blue"})
    places, heard = tmp_path / "places", tmp_path / "heard"
    places.write_text("\n".join([found(P, foreign), found(D, ours)]))
    monkeypatch.setattr(launcher, "DRIVER_COMMAND", (sys.executable, DRIVER, str(places), str(heard)))
    async with RayLauncher(
        held, environment, cluster="test", address="nowhere", token_file="", place_timeout_s=1
    ) as ray:
        await wait_for_async(lambda: heard.exists() and '"start"' in heard.read_text())
        assert [one.worker_id for one in await ray.running()] == [D]
        commands = [json.loads(line) for line in heard.read_text().splitlines()]
        assert commands[:2] == [{"find": "others"}, {"leave": "tandem:test:prefill-0:1"}]
        assert commands[2]["start"] == D


async def test_a_driver_that_says_what_nobody_understands_is_started_again(
    held: HeldState, environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places, heard = tmp_path / "places", tmp_path / "heard"
    places.write_text(json.dumps({"worker": P, "found": "{}"}))  # it lacks the place's name
    monkeypatch.setattr(launcher, "DRIVER_COMMAND", (sys.executable, DRIVER, str(places), str(heard)))
    async with RayLauncher(
        held, environment, cluster="test", address="nowhere", token_file="", place_timeout_s=1
    ) as ray:
        await wait_for_async(lambda: heard.exists() and '"find"' in heard.read_text())
        places.write_text(found(D, to_json(Order(config=spec(D).config, threads=1))))
        await wait_for_async(lambda: '"start"' in heard.read_text())
        assert [one.worker_id for one in await ray.running()] == [D]
