"""Features that only a terminal shows: questions with typed answers, a picture that is redrawn, a bar."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.clusterctl.exit_codes import Exit
from tandem.core.desired import DesiredState, Pool
from tandem.core.state_enums import RoleName
from tandem.statestore.connection import connect
from tandem.statestore.embedded_redis import PrivateRedis
from tandem.statestore.keys import Keys
from tandem.statestore.stores.desired import DesiredStateStore
from tests.integration.clusterctl.terminal import CTRL_C, CTRL_D, Terminal
from tests.integration.router.house import ADMIN_KEY, Build, RouterHarness, builder
from tests.unit.clusterctl.document_check import checked

START = DesiredState(version=1, pools=(
    Pool(name="prefill", model="tiny", role=RoleName.PREFILL, count=1),
    Pool(name="decode", model="tiny", role=RoleName.DECODE, count=3),
)).filled()  # fmt: skip
MORE = ("scale", "--decode", "4", "--no-wait")
PROMPT = "Do that? [y/N]: "
SCREEN, NO_SCREEN = "\x1b[?1049h", "\x1b[?1049l"
"""The terminal's other screen, and back."""


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Build]:
    folder = tmp_path_factory.mktemp("terminal")
    with PrivateRedis.start(folder / "redis", "hush") as server, builder(folder) as make:
        yield lambda **more: make(redis_url=server.url, **more)


@pytest.fixture(scope="module")
def standing(build: Build) -> RouterHarness:
    made = build(decode=3)
    made.wait_ready()
    return made


@pytest.fixture
def house(standing: RouterHarness) -> RouterHarness:
    """The desired state is START."""
    write(standing, START)
    standing.keys.kept.clear()
    standing.router.gate._had_keys = False
    return standing


def write(house: RouterHarness, state: DesiredState) -> None:
    """Write it as the next version of the desired state, as another client would."""

    async def run() -> None:
        redis = await connect(house.config.redis_url)
        try:
            store = DesiredStateStore(redis, Keys(house.config.cluster))
            before = await store.load()
            version = before.version if before is not None else 0
            assert await store.save(replace(state, version=version + 1), version)
        finally:
            await redis.aclose()

    asyncio.run(run())


def on(house: RouterHarness, *arguments: str, out: Path | None = None) -> Terminal:
    where = ("--endpoint", house.admin_url, "--admin-key-file", house.config.admin_key_file)
    return Terminal(*arguments, *where, out=out)


def wanted(house: RouterHarness) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    answer = httpx.get(f"{house.admin_url}/admin/v1/desired", headers=headers).json()
    found: dict[str, Any] = answer["desired"]
    return found


def decoders(house: RouterHarness) -> int:
    return next(int(pool["count"]) for pool in wanted(house)["pools"] if pool["name"] == "decode")


# ---- questions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", ["y", "Yes"])
def test_a_change_is_shown_agreed_to_and_made(house: RouterHarness, answer: str) -> None:
    with on(house, *MORE) as terminal:
        terminal.wait_for(PROMPT)
        shown = terminal.shown
        assert "+ decode-3: start (as decode in decode)\n  prefill 1, decode 3 → prefill 1, decode 4\n" in shown
        assert decoders(house) == 3, "not before somebody agrees"
        place = len(terminal.shown)
        for unclear in ("perhaps\n", "\udcff\n"):
            terminal.type(unclear)
            place = terminal.wait_for("answer y or n", after=place)
            place = terminal.wait_for(PROMPT, after=place)
        terminal.type(f"{answer}\n")
        assert terminal.end() == 0, terminal.shown
    assert decoders(house) == 4


@pytest.mark.parametrize(
    ("keys", "code"), [("n\n", 1), ("\n", 1), ("No\n", 1), (CTRL_C, Exit.INTERRUPTED), (CTRL_D, Exit.INTERRUPTED)]
)
def test_whoever_does_not_agree_changes_nothing(house: RouterHarness, keys: str, code: int) -> None:
    before = wanted(house)
    with on(house, *MORE) as terminal:
        terminal.wait_for(PROMPT)
        terminal.type(keys)
        assert terminal.end() == code, terminal.shown
        assert ("nothing was changed" in terminal.shown) is (code == 1)
    assert wanted(house) == before


def test_a_question_is_no_data(house: RouterHarness, tmp_path: Path) -> None:
    """It stands on the terminal, and what the command prints is in the file to the byte."""
    out = tmp_path / "key"
    with on(house, "key", "create", "--tenant", "acme", out=out) as terminal:
        terminal.wait_for(PROMPT)
        assert "~ requests without a key: set (refused from now on: it is the first key)" in terminal.shown
        terminal.type("y\n")
        assert terminal.end() == 0, terminal.shown
    assert out.read_text().startswith("tdk-")
    out = tmp_path / "change"
    with on(house, *MORE, "-o", "json", out=out) as terminal:
        terminal.wait_for(PROMPT)
        terminal.type("y\n")
        assert terminal.end() == 0, terminal.shown
    assert out.read_text().startswith("{")
    assert checked(out.read_text(), "Change")["is_changed"]


def test_the_end_of_a_cluster_is_asked_about(house: RouterHarness) -> None:
    downs = house.downs
    with on(house, "down", "--timeout", "0.1") as terminal:
        terminal.wait_for(PROMPT)
        for line in ("- cluster test: stop (0 requests in flight, 0 waiting)", "- decode-0: stop (decode)"):
            assert line in terminal.shown
        terminal.type("n\n")
        assert terminal.end() == 1
    assert house.downs == downs
    with on(house, "down", "--timeout", "0.1") as terminal:
        terminal.wait_for(PROMPT)
        terminal.type("y\n")
        assert terminal.end() == Exit.TIMEOUT, "this router was asked to stop, and goes on"
    assert house.downs == downs + 1


# ---- another client was faster -------------------------------------------------------------------------------------


def test_who_agrees_too_late_is_told(house: RouterHarness) -> None:
    with on(house, *MORE) as terminal:
        terminal.wait_for(PROMPT)
        write(house, replace(START, drain_deadline_s=7.0))
        before = wanted(house)
        terminal.type("y\n")
        assert terminal.end() == Exit.CONFLICT, terminal.shown
        assert "another client changed the desired state" in terminal.shown
    assert wanted(house) == before


def test_a_rollout_that_says_the_same_after_somebody_was_faster_is_written(house: RouterHarness) -> None:
    """The steps of rollouts change the record all the while; what was agreed to stays agreed to."""
    with on(house, "rollout", "start", "--set", "worker.chunk_tokens=256", "--no-wait") as terminal:
        terminal.wait_for(PROMPT)
        write(house, replace(START, drain_deadline_s=7.0))
        terminal.type("y\n")
        assert terminal.end() == 0, terminal.shown
        assert terminal.shown.count(PROMPT) == 1
    found = wanted(house)
    assert found["drain_deadline_s"] == 7.0
    assert [one["phase"] for one in found["rollouts"]] == ["rolling"]


def test_a_rollout_that_would_be_another_one_is_not_written(house: RouterHarness) -> None:
    with on(house, "rollout", "start", "--set", "worker.chunk_tokens=256", "--no-wait") as terminal:
        terminal.wait_for(PROMPT)
        revised = tuple(replace(pool, revision="r2") for pool in START.pools)
        members = tuple(replace(member, revision="r2") for member in START.members)
        write(house, replace(START, pools=revised, members=members))
        before = wanted(house)
        terminal.type("y\n")
        assert terminal.end() == Exit.CONFLICT, terminal.shown
    assert wanted(house) == before


def test_who_waits_is_told_that_somebody_else_wants_something_else(house: RouterHarness) -> None:
    """No controller starts the fourth worker here."""
    with on(house, "scale", "--decode", "4", "--yes") as terminal:
        terminal.wait_for("decode-3 is absent")
        write(house, START)
        assert terminal.end() == Exit.CONFLICT, terminal.shown
        assert "another writer changed the desired state meanwhile" in terminal.shown


def test_a_wait_that_is_over_is_no_failure_of_the_change(house: RouterHarness) -> None:
    with on(house, "scale", "--decode", "4", "--yes", "--timeout", "0.3") as terminal:
        assert terminal.end() == Exit.TIMEOUT, terminal.shown
        assert "the cluster is not as desired after 0.3 s: decode-3 is absent" in terminal.shown.replace("\n", " ")
    assert decoders(house) == 4


# ---- what is drawn again -------------------------------------------------------------------------------------------


def test_top_draws_again_until_ctrl_c_and_gives_the_screen_back(house: RouterHarness) -> None:
    with on(house, "top", "--every", "0.1") as terminal:
        place = terminal.wait_for(SCREEN)
        place = terminal.wait_for("since the router started", after=place)
        for _ in range(2):
            place = terminal.wait_for("of the last ", after=place)
        for words in ("test: ok", "prefill-0", "decode-2", "TTFT p50"):
            assert words in terminal.shown, terminal.shown
        assert NO_SCREEN not in terminal.shown
        terminal.type(CTRL_C)
        assert terminal.end() == Exit.INTERRUPTED
        assert NO_SCREEN in terminal.shown


def test_top_outlives_a_router_that_does_not_answer(build: Build) -> None:
    house = build()
    with on(house, "top", "--every", "0.1") as terminal:
        place = terminal.wait_for("of the last ")
        house.stop()
        terminal.wait_for("no cluster answers at", after=place)
        assert terminal.process.poll() is None
        terminal.type(CTRL_C)
        assert terminal.end() == Exit.INTERRUPTED
        assert NO_SCREEN in terminal.shown


def test_top_is_a_document_for_programs_on_a_terminal_too(house: RouterHarness, tmp_path: Path) -> None:
    out = tmp_path / "top"
    with on(house, "top", "-o", "json", out=out) as terminal:
        assert terminal.end() == 0, terminal.shown
        assert terminal.shown == ""
    assert checked(out.read_text(), "Top")["workers"]


def test_long_work_has_a_bar_on_the_terminal_and_none_in_the_data(house: RouterHarness, tmp_path: Path) -> None:
    house.wait_ready()
    out = tmp_path / "bench"
    load = ("--rate", "10", "--requests", "20", "--prompt-tokens", "32", "--output-tokens", "4", "-o", "json")
    with Terminal("bench", "--url", house.url, *load, out=out) as terminal:
        terminal.wait_for("/20")
        assert "answered" in terminal.shown
        assert "━" in terminal.shown
        assert terminal.end() == 0, terminal.shown
        last = terminal.shown.rpartition("/20")[2]
        assert "\x1b[2K" in last, "it is wiped away at the end"
    assert checked(out.read_text(), "Bench")["requests"] == 20
