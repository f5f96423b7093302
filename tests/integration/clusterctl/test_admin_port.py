"""Test `clusterctl` against a real admin port: plans and rollouts."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from tandem.clusterctl import main as program
from tandem.clusterctl.exit_codes import Exit
from tandem.clusterctl.planning.live_plan import next_action
from tandem.clusterctl.schemas.kinds import schema
from tandem.core.desired import DesiredState, Pool, RolloutPhase
from tandem.core.rollouts import started
from tandem.core.state_enums import RoleName
from tandem.statestore.connection import connect
from tandem.statestore.embedded_redis import PrivateRedis
from tandem.statestore.keys import Keys
from tandem.statestore.stores.desired import DesiredStateStore
from tandem.statestore.stores.planning import PlanningStore
from tests.integration.router.house import ADMIN_KEY, RouterHarness, builder


def forecast(split: str, attained: float) -> dict[str, Any]:
    return {"split": split, "attained": attained, "goodput_per_s": 1.0, "ttft_p90_s": 2.0, "itl_p90_s": 0.02,
            "prefill_busy": 0.5}  # fmt: skip


WORD: dict[str, Any] = {
    "mode": "advise", "at_s": 1e9, "version": 3, "split": "1P:3D", "wanted": "2P:2D", "reason": "it is better",
    "is_due": True, "is_advice": True, "waits_s": 0.0, "requests": 90, "routers": 2, "unsettled": "",
    "link_bytes_per_s": 3.2e9,
    "now": forecast("1P:3D", 0.2), "then": forecast("2P:2D", 0.987),
    "last_advice": {"at_s": 1e9, "what": "1P:3D → 2P:2D, because so"},
    "last_action": None, "last_denial": None,
}  # fmt: skip


@pytest.fixture
def house(tmp_path: Path) -> Iterator[RouterHarness]:
    with PrivateRedis.start(tmp_path / "redis", "hush") as server, builder(tmp_path) as make:
        (tmp_path / "key").write_text(ADMIN_KEY)
        yield make(redis_url=server.url)


def say(house: RouterHarness, word: dict[str, Any]) -> None:
    async def run() -> None:
        redis = await connect(house.config.redis_url)
        await PlanningStore(redis, Keys(house.config.cluster)).say(word, for_s=600.0)
        await redis.aclose()

    asyncio.run(run())


def live(house: RouterHarness, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    key = house.config.admin_key_file
    code = program.run(["plan", "--live", "--endpoint", house.admin_url, "--admin-key-file", key, *more])
    out, error = capsys.readouterr()
    assert code == Exit.OK, error
    return out


def document(house: RouterHarness, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(live(house, capsys, "-o", "json"))
    errors = jsonschema_rs.Draft202012Validator(schema("LivePlan")).iter_errors(found)
    assert [str(error) for error in errors] == []
    return found


def test_what_it_wants_and_why_and_what_it_advised(house: RouterHarness, capsys: pytest.CaptureFixture[str]) -> None:
    assert document(house, capsys)["plan"] is None
    assert "the planner is off" in live(house, capsys)
    say(house, WORD)
    assert document(house, capsys)["plan"] == WORD
    lines = {line[:15].strip(): line[16:] for line in live(house, capsys).splitlines()}
    assert lines["mode"] == "advise"
    assert lines["wanted"] == "2P:2D"
    assert lines["because"] == "it is better"
    assert lines["links"] == "3.20 GB/s"
    assert lines["next action"] == "never, it only advises"
    assert lines["last advice"] == "2001-09-09 01:46:40 1P:3D → 2P:2D, because so"
    assert "98.7%" in live(house, capsys)
    say(house, {**WORD, "link_bytes_per_s": 0})
    assert "not measured: moving KV is taken to need no time" in live(house, capsys)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"unsettled": "decode-1 is to leave"}, "not while decode-1 is to leave"),
        ({"wanted": "1P:3D"}, "none is wanted"),
        ({"wanted": "1P:3D", "waits_s": 7.0}, "none is wanted, and nothing for 7 s"),
        ({"waits_s": 7.0}, "in 7 s at the earliest"),
        ({"is_due": False}, "once it has wanted the same for long enough"),
        ({"mode": "act", "is_advice": False}, "now"),
        ({"mode": "act"}, "never, it only advises"),
    ],
)
def test_when_it_would_act_next(changes: dict[str, Any], said: str) -> None:
    assert said in next_action({**WORD, **changes})


START = DesiredState(version=1, pools=(
    Pool(name="mixed", model="one", role=RoleName.MIXED, count=1),
    Pool(name="mixed-m2", model="two", role=RoleName.MIXED, count=1),
)).filled()  # fmt: skip
REASON = "mixed-1: it has no weights"


def save(house: RouterHarness, phases: dict[str, RolloutPhase]) -> None:
    """A rollout for each model that is named, in that phase."""
    state = START
    for model in phases:
        state = started(state, model=model, name="r2")
    rollouts = tuple(
        replace(one, phase=phases[one.model], reason=REASON if phases[one.model] is RolloutPhase.FAILED else "")
        for one in state.rollouts
    )

    async def run() -> None:
        redis = await connect(house.config.redis_url)
        assert await DesiredStateStore(redis, Keys(house.config.cluster)).save(replace(state, rollouts=rollouts), 0)
        await redis.aclose()

    asyncio.run(run())


def status(house: RouterHarness, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, document if there is one, standard error."""
    where = ("--endpoint", house.admin_url, "--admin-key-file", house.config.admin_key_file)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("sys.argv", ["clusterctl", "rollout", "status", *where, "-o", "json", *flags])
        with pytest.raises(SystemExit) as ended:
            program.main()
    out, error = capsys.readouterr()
    return int(ended.value.code or 0), json.loads(out) if out else {}, error


@pytest.mark.parametrize(
    ("phases", "without", "waited", "error"),
    [
        ({}, Exit.OK, Exit.OK, ""),
        ({"one": RolloutPhase.DONE}, Exit.OK, Exit.OK, ""),
        ({"one": RolloutPhase.FAILED}, Exit.UNHEALTHY, Exit.UNHEALTHY, ""),
        ({"one": RolloutPhase.PAUSED}, Exit.OK, Exit.CONFLICT, "the rollout of one to r2 is paused"),
        ({"one": RolloutPhase.PAUSED, "two": RolloutPhase.FAILED}, Exit.UNHEALTHY, Exit.UNHEALTHY, ""),
    ],
)
def test_what_is_not_on_its_way_is_shown_at_once(
    house: RouterHarness,
    capsys: pytest.CaptureFixture[str],
    phases: dict[str, RolloutPhase],
    without: Exit,
    waited: Exit,
    error: str,
) -> None:
    save(house, phases)
    for flags, expected, told in (((), without, ""), (("--wait",), waited, error)):
        code, found, said = status(house, capsys, *flags)
        assert (code, told in said) == (expected, True), said
        shown = {row["model"]: (row["phase"], row["reason"]) for row in found["items"]}
        assert {model: (phase, REASON if phase == "failed" else "") for model, phase in phases.items()} == {
            model: shown[model] for model in phases
        }


def test_one_on_its_way_is_waited_for_whatever_the_others_do(
    house: RouterHarness, capsys: pytest.CaptureFixture[str]
) -> None:
    save(house, {"one": RolloutPhase.FAILED, "two": RolloutPhase.ROLLING})
    code, found, error = status(house, capsys, "--wait", "--timeout", "0.2")
    assert (code, found) == (Exit.TIMEOUT, {})
    assert "two to r2: mixed-m2 0 of 1" in error
    code, found, _ = status(house, capsys, "--wait", "--model", "one")
    assert (code, len(found["items"])) == (Exit.UNHEALTHY, 1)
