"""Every command that changes a running cluster, against a real admin port: it can be tried without changing anything,
asks where there is a terminal, needs `--yes` where there is none, and a second call changes nothing more."""

import asyncio
import io
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest

from tandem.clusterctl import main as program
from tandem.clusterctl.admin_client import AdminClient
from tandem.clusterctl.exit_codes import Exit
from tandem.core.api_keys import KeyWish, draw
from tandem.core.config import SloSection
from tandem.core.desired import DesiredState, Pool
from tandem.core.desired_changes import cordoned
from tandem.core.rollouts import paused, started
from tandem.core.state_enums import RoleName
from tandem.statestore.connection import connect
from tandem.statestore.embedded_redis import PrivateRedis
from tandem.statestore.keys import Keys
from tandem.statestore.stores.desired import DesiredStateStore
from tests.integration.router.house import ADMIN_KEY, RouterHarness, builder
from tests.unit.clusterctl.command_tree import ALL, flags_of
from tests.unit.clusterctl.document_check import checked

START = DesiredState(version=1, pools=(
    Pool(name="prefill", model="tiny", role=RoleName.PREFILL, count=1),
    Pool(name="decode", model="tiny", role=RoleName.DECODE, count=3),
)).filled()  # fmt: skip
ROLLING = started(START, model="tiny", name="r2")
CHAT = SloSection(ttft_s=0.5)
_, KEY = draw(KeyWish(tenant="acme"), 1000)
LEAK: dict[str, Any] = {
    "worker": "decode-0", "incarnation": "22", "group": 0, "kind": "reserved", "key": "r#1/7", "request": "r",
    "attempt": 1, "since_s": 5.0, "age_s": 9.0, "blocks": [3, 4, 5, 9], "verdict": "suspect", "why": "nobody knows it",
    "peer": "prefill-0", "peer_incarnation": "11", "is_fenced": True,
}  # fmt: skip
LOOK = {"took_s": 0.1, "router": "r1", "workers": [], "unanswered": [], "holds": [LEAK]}
ANSWERS = {"y": "y\n", "n": "n\n", "nothing": ""}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A call that changes something of `state`. `dry`: what --dry-run prints; `done`: what the call itself prints."""

    arguments: tuple[str, ...]
    state: DesiredState = START
    dry: str = "Change"
    done: str = "Change"
    code: int = 0
    """Of the call itself."""
    code_dry: int = 0
    has_key: bool = True
    repeats: bool = True
    """A second call changes nothing."""


CHANGING: Mapping[tuple[str, ...], Case] = {
    ("scale",): Case(arguments=("--decode", "4", "--no-wait")),
    ("flip",): Case(arguments=("decode-1", "--to", "prefill", "--no-wait")),
    ("drain",): Case(arguments=("decode-1", "--no-wait")),
    ("uncordon",): Case(
        arguments=("decode-2", "--no-wait"), state=cordoned(START, "decode-2", is_cordoned=True)
    ),
    ("restart",): Case(arguments=("decode-1", "--no-wait"), repeats=False),
    ("rollout", "start"): Case(arguments=("--set", "worker.chunk_tokens=256", "--no-wait")),
    ("rollout", "pause"): Case(arguments=(), state=ROLLING),
    ("rollout", "resume"): Case(arguments=("--no-wait",), state=paused(ROLLING)),
    ("rollout", "undo"): Case(arguments=("--no-wait",), state=ROLLING),
    ("down",): Case(arguments=("--timeout", "0.05"), dry="Effect", done="", code=Exit.TIMEOUT, repeats=False),
    ("key", "create"): Case(
        arguments=("--tenant", "acme"), dry="Effect", done="ApiKey", has_key=False, repeats=False
    ),
    ("key", "revoke"): Case(arguments=(KEY.shown,), dry="Effect", done="Effect"),
    ("slo", "set"): Case(arguments=("chat", "--ttft", "0.8"), dry="Effect", done="SloClasses"),
    ("route", "policy"): Case(arguments=("round_robin",), dry="Effect", done="RoutingPolicy"),
    ("kv", "audit"): Case(
        arguments=("--repair", "--wait", "0"), dry="KvAudit", done="KvAudit", code=Exit.UNHEALTHY,
        code_dry=Exit.UNHEALTHY, repeats=False,
    ),
}  # fmt: skip
"""`kv audit`: its router does not know the leak that is planted below, and so releases nothing. `down`: this router
goes on."""
STARTING = {("up",), ("join",)}
KEEPING = {("models", "pull"), ("models", "remove")}
"""They change files of this user alone, and what they do can be done again."""
LOOKING = {
    ("status",), ("top",), ("trace",), ("logs",), ("get", "pools"), ("get", "workers"), ("describe",), ("events",),
    ("plan",), ("net",), ("doctor",), ("completion",), ("version",), ("bench",), ("replay",), ("rollout", "status"),
    ("chat",), ("key", "list"), ("slo", "list"), ("route", "explain"), ("simulate", "splits"), ("simulate", "map"),
    ("config", "view"), ("config", "validate"), ("config", "explain"), ("models", "list"),
}  # fmt: skip
"""`chat`, `bench` and `replay` send what clients send, and change nothing."""
each_change = pytest.mark.parametrize("words", CHANGING, ids=" ".join)


def test_every_command_is_said_to_change_something_or_not() -> None:
    assert set(ALL) == {*CHANGING, *STARTING, *KEEPING, *LOOKING}
    for words in CHANGING:
        assert {"--dry-run", "--yes", "-y", "--output"} <= flags_of(words), words
    for words in STARTING:
        assert {"--dry-run", "--output"} <= flags_of(words), words
    for words in (*LOOKING, *KEEPING):
        assert not {"--dry-run", "--yes"} & flags_of(words), words


class Terminal(io.StringIO):
    """A standard input with a user at a terminal."""

    def isatty(self) -> bool:
        return True


@dataclass
class Scene:
    """A test router, and clusterctl's requests to its admin port other than reads."""

    house: RouterHarness
    http: httpx.Client
    capsys: pytest.CaptureFixture[str]
    monkeypatch: pytest.MonkeyPatch
    asked: list[str]

    def run(self, words: tuple[str, ...], *flags: str, typed: str | None = None) -> tuple[int, str, str]:
        """Exit code, stdout and stderr; without `typed` the standard input is no terminal."""
        self.asked.clear()
        self.monkeypatch.setattr(sys, "stdin", io.StringIO() if typed is None else Terminal(typed))
        where = ("--endpoint", self.house.admin_url, "--admin-key-file", self.house.config.admin_key_file)
        code = program.run([*words, *CHANGING[words].arguments, *where, *flags])
        return code, *self.capsys.readouterr()

    def held(self) -> dict[str, Any]:
        """All that a command could have changed."""
        found = {path: self._admin("GET", path).json() for path in ("desired", "keys", "slo", "route/policy")}
        return {**found, "downs": self.house.downs}

    def prepare(self, case: Case) -> None:
        """Bring the test router into the case's state."""
        keys = self.house.keys
        keys.kept, keys.gone = {KEY.id: KEY} if case.has_key else {}, []
        self.house.router.gate._had_keys = False
        chat = {"slo": "chat", "ttft_s": CHAT.ttft_s, "itl_s": CHAT.itl_s}
        self._admin("POST", "slo", chat).raise_for_status()
        self._admin("POST", "route/policy", {"policy": "cost"}).raise_for_status()
        asyncio.run(self._save(case.state))

    async def _save(self, state: DesiredState) -> None:
        redis = await connect(self.house.config.redis_url)
        try:
            store = DesiredStateStore(redis, Keys(self.house.config.cluster))
            before = await store.load()
            version = before.version if before is not None else 0
            assert await store.save(replace(state, version=version + 1), version)
        finally:
            await redis.aclose()

    def _admin(self, method: str, path: str, body: object = None) -> httpx.Response:
        return self.http.request(method, f"/admin/v1/{path}", json=body)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterHarness]:
    folder = tmp_path_factory.mktemp("changing")
    with PrivateRedis.start(folder / "redis", "hush") as server, builder(folder) as make:
        yield make(redis_url=server.url, decode=3, slo={"chat": CHAT})


@pytest.fixture(scope="module")
def http(house: RouterHarness) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=house.admin_url, headers={"authorization": f"Bearer {ADMIN_KEY}"}) as client:
        yield client


@pytest.fixture
def scene(
    house: RouterHarness, http: httpx.Client, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Scene:
    asked: list[str] = []
    call = AdminClient._call

    def listening(self: AdminClient, method: str, path: str, body: object = None) -> httpx.Response:
        if method != "GET" and not path.endswith("/propose"):
            asked.append(f"{method} {path}")
        return call(self, method, path, body)

    monkeypatch.setattr(AdminClient, "_call", listening)
    monkeypatch.setattr(AdminClient, "audit", lambda self: LOOK)
    return Scene(house, http, capsys, monkeypatch, asked)


@each_change
def test_a_dry_run_changes_nothing_and_says_what_would(scene: Scene, words: tuple[str, ...]) -> None:
    case = CHANGING[words]
    scene.prepare(case)
    before = scene.held()
    code, out, error = scene.run(words, "--dry-run", "-o", "json")
    assert (code, scene.asked) == (case.code_dry, []), error
    found = checked(out, case.dry)
    if case.dry == "KvAudit":
        assert [hold["key"] for hold in found["would_release"]] == [LEAK["key"]]
    else:
        assert (found["is_dry_run"], found["is_changed"]) == (True, True)
        assert found["changes"] or found["before"] != found["after"]
    code, out, _ = scene.run(words, "--dry-run")
    assert (code, scene.asked) == (case.code_dry, [])
    assert "nothing was changed (--dry-run)" in out
    assert scene.held() == before


@each_change
def test_it_needs_yes_where_there_is_no_terminal(scene: Scene, words: tuple[str, ...]) -> None:
    scene.prepare(CHANGING[words])
    before = scene.held()
    code, out, error = scene.run(words)
    assert (code, out, scene.asked) == (Exit.USAGE, "", [])
    assert "this changes the cluster and cannot be confirmed: the standard input is not a terminal" in error
    assert "--yes" in error
    assert len(error.splitlines()) == 1
    assert scene.held() == before


@each_change
@pytest.mark.parametrize("answer", ["n", "nothing"])
def test_it_shows_the_difference_and_takes_no_for_an_answer(scene: Scene, words: tuple[str, ...], answer: str) -> None:
    scene.prepare(CHANGING[words])
    before = scene.held()
    code, out, error = scene.run(words, typed=ANSWERS[answer])
    assert (code, out, scene.asked) == (1 if answer == "n" else Exit.INTERRUPTED, "", [])
    assert [line for line in error.splitlines() if line[:2] in ("+ ", "- ", "~ ")], error
    assert "Do that? [y/N]" in error
    assert scene.held() == before


@each_change
@pytest.mark.parametrize("is_asked", [True, False], ids=["asked", "--yes"])
def test_it_is_done_once(scene: Scene, words: tuple[str, ...], is_asked: bool) -> None:
    case = CHANGING[words]
    scene.prepare(case)
    before = scene.held()
    how: dict[str, Any] = {"typed": ANSWERS["y"]} if is_asked else {}
    code, out, error = scene.run(words, "-o", "json", *([] if is_asked else ["--yes"]), **how)
    assert (code, len(scene.asked)) == (case.code, 1), error
    assert ("Do that?" in error) is is_asked
    if case.done:
        checked(out, case.done)
    assert (scene.held() == before) is (words == ("kv", "audit"))
    if case.repeats:
        after = scene.held()
        code, out, error = scene.run(words, "-o", "json")
        assert (code, scene.asked) == (0, []), error
        checked(out, case.done)
        assert scene.held() == after


def test_a_standard_input_that_is_closed_is_no_terminal() -> None:
    code = "import sys; sys.stdin = None; from tandem.clusterctl.confirm import Consent; Consent().check()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "ConfigError: this changes the cluster and cannot be confirmed" in done.stderr


def test_a_key_that_shuts_nobody_out_is_made_without_asking(scene: Scene) -> None:
    """It only adds; so does one where requests without a key are refused already, though it is the first."""
    words = ("key", "create")
    scene.prepare(replace(CHANGING[words], has_key=True))
    code, out, error = scene.run(words)
    assert (code, len(scene.asked)) == (0, 1), error
    assert out.startswith("tdk-")


def test_a_key_for_a_class_that_is_not_there_is_found_before(scene: Scene) -> None:
    code, _, error = scene.run(("key", "create"), "--slo", "chatt", "--dry-run")
    assert (code, scene.asked) == (Exit.USAGE, [])
    assert "the SLO class 'chatt' does not exist: there are: chat" in error


def test_a_policy_that_is_not_there_is_found_before_anybody_is_asked(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CHANGING, ("route", "policy"), Case(arguments=("round_robbin",)))
    code, _, error = scene.run(("route", "policy"), typed="y\n")
    assert (code, scene.asked) == (Exit.USAGE, [])
    assert "there is no policy 'round_robbin'. Did you mean 'round_robin'?" in error
