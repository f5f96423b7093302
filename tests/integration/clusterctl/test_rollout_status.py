"""`clusterctl rollout status` against a real admin port, of rollouts that no controller advances."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.clusterctl import main as program
from tandem.clusterctl.exit_codes import Exit
from tandem.core.desired import DesiredState, Pool, RolloutPhase
from tandem.core.lifecycle import RoleName
from tandem.core.rollouts import started
from tandem.statestore.connection import connect
from tandem.statestore.embedded_redis import PrivateRedis
from tandem.statestore.keys import Keys
from tandem.statestore.stores.desired import DesiredStateStore
from tests.integration.router.house import ADMIN_KEY, RouterHarness, builder

START = DesiredState(version=1, pools=(
    Pool(name="mixed", model="one", role=RoleName.MIXED, count=1),
    Pool(name="mixed-m2", model="two", role=RoleName.MIXED, count=1),
)).filled()  # fmt: skip
REASON = "mixed-1: it has no weights"


@pytest.fixture
def house(tmp_path: Path) -> Iterator[RouterHarness]:
    with PrivateRedis.start(tmp_path / "redis", "hush") as server, builder(tmp_path) as make:
        (tmp_path / "key").write_text(ADMIN_KEY)
        yield make(redis_url=server.url)


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
