"""Views of the cluster for people: status, routes, links and figures over time."""

import io
import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from rich.console import Console

from tandem.clusterctl.inspect import status, status_view, top
from tandem.clusterctl.inspect.histograms import Scrape
from tandem.clusterctl.inspect.status import with_wanted
from tandem.clusterctl.inspect.status_summary import pool_of
from tandem.clusterctl.kv import net as net_module
from tandem.clusterctl.output import Format, Output
from tandem.clusterctl.serving_policy import route
from tandem.clusterctl.unscheduled import Unplaced
from tandem.core.admin_schema import RoutingCost
from tandem.core.errors import ConfigError, UnavailableError
from tandem.core.ids import WorkerId
from tandem.router.routing.plan import Cost, Plan, decision, option_of
from tests.unit.router.candidates import d


class Scripted:
    """Looks as they are given; None: no answer. Each takes a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *looks: int | None) -> None:
        self._looks, self._now_s = list(looks), 0.0
        monkeypatch.setattr("tandem.clusterctl.inspect.top.time.monotonic", lambda: self._now_s)

    def look(self) -> dict[str, Any]:
        self._now_s += 1.0
        if not self._looks:
            raise KeyboardInterrupt
        found = self._looks.pop(0)
        if found is None:
            raise UnavailableError("nobody answers")
        return {"in_flight": found}


def lines(capsys: pytest.CaptureFixture[str]) -> list[int]:
    return [json.loads(line)["in_flight"] for line in capsys.readouterr().out.splitlines()]


def follow(scene: Any) -> None:
    top._stream(scene, Output(output=Format.JSON), 0.0)


def test_a_router_that_starts_again_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(KeyboardInterrupt):
        follow(Scripted(monkeypatch, 1, None, None, 2, *[None] * 29, 3))
    assert lines(capsys) == [1, 2, 3]


def test_one_that_does_not_come_back_ends_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UnavailableError):
        follow(Scripted(monkeypatch, 1, *[None] * 31, 2))
    assert lines(capsys) == [1]
    with pytest.raises(UnavailableError):
        follow(Scripted(monkeypatch, None, 1))
    assert lines(capsys) == [], "nor is the first look waited for"


BOUNDS = (0.1, 0.2, 0.5, 1.0)


def scrape(*observed: float, counted: int = 0) -> Scrape:
    """Return a scrape of a real registry."""
    registry = CollectorRegistry()
    histogram = Histogram("wait_seconds", "x", buckets=BOUNDS, registry=registry)
    counter = Counter("things_total", "x", ["kind"], registry=registry)
    for value in observed:
        histogram.observe(value)
    counter.labels("a").inc(counted)
    counter.labels('b="c",le="7"').inc(counted and 1)
    return Scrape.parse(generate_latest(registry).decode())


def test_counters_are_added_up_over_their_labels() -> None:
    assert scrape(counted=4).total("things_total") == 5
    assert scrape().total("no_such_total") == 0


def test_quantiles_lie_between_the_bounds() -> None:
    found = scrape(*[0.05] * 50, *[0.15] * 50)
    assert found.quantile("wait_seconds", 0.5) == pytest.approx(0.1)
    assert found.quantile("wait_seconds", 0.75) == pytest.approx(0.15)
    assert found.quantile("wait_seconds", 1.0) == pytest.approx(0.2)
    assert scrape(7.0).quantile("wait_seconds", 0.5) == 1.0, "beyond the last bound nothing is known"
    assert scrape().quantile("wait_seconds", 0.5) is None
    assert scrape().quantile("no_such_seconds", 0.5) is None


@given(st.lists(st.floats(0.0, 0.99), min_size=1, max_size=50), st.floats(0.01, 1.0))
def test_a_quantile_is_in_the_bucket_of_the_true_one(observed: list[float], share: float) -> None:
    found = scrape(*observed).quantile("wait_seconds", share)
    assert found is not None
    true = sorted(observed)[max(0, -int(-share * len(observed) // 1) - 1)]
    upper = next(bound for bound in BOUNDS if true <= bound)
    lower = max((bound for bound in (0.0, *BOUNDS) if bound < upper), default=0.0)
    assert lower <= found <= upper + 1e-9


def test_between_two_looks() -> None:
    before, now = scrape(0.05, 0.05, counted=3), scrape(0.05, 0.05, 0.15, counted=6)
    recent = now.since(before)
    assert recent.total("things_total") == 3
    assert recent.quantile("wait_seconds", 0.5) == pytest.approx(0.15)
    anew = scrape(0.15, counted=1).since(before)
    assert anew.total("things_total") == 2, "the router began anew"


A = "1c9f-boot.4026531834:4026531836.node-a"
B = "77aa-boot.4026531834:4026531836.node-b.example"
OTHER_A = "99ff-boot.4026531834:4026531836.node-a"


def measured_row(from_host: str, to_host: str, transport: str, **more: Any) -> dict[str, Any]:
    fields = {"peer": "d0", "bytes_per_s": 0.0, "latency_s": 0.0, "age_s": 7.0, "failure": "", "is_used": False}
    return {"from_host": from_host, "to_host": to_host, "transport": transport} | fields | more


LINK: dict[str, Any] = {
    "worker": "p0", "rank": 1, "peer": "d0", "peer_rank": 0, "transport": "tcp", "from_host": A, "to_host": B,
    "bytes_per_s": 1.5e9, "latency_s": 9e-5, "achieved_bytes_per_s": 4e8, "stalls": 12,
    "reason": "another host; shm failed: refused", "unused": ["shm failed: refused"],
}  # fmt: skip


def shown_links(net: dict[str, Any]) -> str:
    text = io.StringIO()
    net_module.show(net, Console(file=text, width=200))
    return text.getvalue()


def test_matrix_links_and_warnings() -> None:
    page = shown_links({
        "measured": [
            measured_row(A, B, "shm", failure="refused"),
            measured_row(A, B, "tcp", bytes_per_s=1.5e9, latency_s=9e-5, is_used=True),
            measured_row(B, A, "tcp", bytes_per_s=12.5e6, latency_s=2e-3, age_s=600.0),
        ],
        "links": [LINK],
    })  # fmt: skip
    lines = [" ".join(line.split()) for line in page.splitlines()]
    assert lines[0] == "FROM TO shm tcp"
    assert "node-a node-b.example failed 1.50 GB/s, 90 µs, 7 s ago *" in lines
    assert "node-b.example node-a – 12.5 MB/s, 2000 µs, 10 min ago" in lines
    assert "failed: shm from node-a to node-b.example, to d0, 7 s ago: refused" in lines
    assert "p0.1 → d0.0 tcp 1.50 GB/s 400 MB/s 12 another host; shm failed: refused" in lines
    assert "warning: p0.1 → d0.0 goes over tcp: shm failed: refused" in lines


def test_a_link_that_dials_and_a_success_beside_another_worker_s_failure() -> None:
    dialling = LINK | {"transport": "", "bytes_per_s": 0.0, "achieved_bytes_per_s": 0.0, "unused": [], "stalls": 0}
    measured = [measured_row(A, B, "tcp", failure="refused", peer="d7"), measured_row(A, B, "tcp", bytes_per_s=1e9)]
    page = shown_links({"measured": measured, "links": [dialling | {"reason": "dialling"}]})
    lines = [" ".join(line.split()) for line in page.splitlines()]
    assert "p0.1 → d0.0 dialling – – 0 dialling" in lines
    assert "node-a node-b.example 1.00 GB/s, 0 µs, 7 s ago" in lines


def test_nothing_yet() -> None:
    assert shown_links({"measured": [], "links": []}).startswith("no link was measured yet")


def test_machines_of_one_name_are_told_apart() -> None:
    names = net_module.short_names([A, B, OTHER_A, A, "", "odd"])
    assert (names[A], names[OTHER_A], names[B]) == ("node-a", "node-a#2", "node-b.example")
    assert (names[""], names["odd"]) == ("–", "odd")


COST = {"queue_s": 0.5, "compute_s": 0.25, "move_s": 0.005, "room_s": 0.0, "decode_s": 0.001, "others_s": 0.0,
        "broken_s": 0.0, "reuse_s": 0.0, "total_s": 0.756}  # fmt: skip
ROUTE_WORKER: dict[str, Any] = {
    "worker": "p0", "role": "prefill", "queued_tokens": 700, "queued_requests": 2, "in_flight": 2, "decoding": 0,
    "held_tokens": 32, "reusable_tokens": 32, "free_blocks": 90, "total_blocks": 100,
    "prefill_tokens_per_s": 1234.5, "decode_step_s": 0.0, "decode_sequence_s": 0.0,
}  # fmt: skip
FOUND: dict[str, Any] = {
    "prompt_tokens": 100, "max_tokens": 16, "policy": "cost", "prefill": "p0", "decode": "d0", "reason": "least",
    "prefill_hit_tokens": 32, "decode_hit_tokens": 0, "sources": [{"worker": "d1", "tokens": 64}],
    "options": [{"prefill": "p0", "decode": "d0", "score": 0.756, "cost": COST},
                {"prefill": None, "decode": "m0", "score": 0.9, "cost": COST | {"total_s": 0.9}}],
    "workers": [ROUTE_WORKER],
}  # fmt: skip


def shown_route(found: dict[str, Any]) -> list[str]:
    text = io.StringIO()
    route._show_decision(found, Console(file=text, width=200))
    return [" ".join(line.split()) for line in text.getvalue().splitlines()]


def test_a_decision_with_costs() -> None:
    lines = shown_route(FOUND)
    assert "chosen p0 → d0: least" in lines
    assert "fetched 64 tokens from d1" in lines
    assert "PREFILL DECODE QUEUE COMPUTE MOVE ROOM DECODE OTHERS BROKEN REUSE TOTAL, ms" in lines
    assert "p0 d0 500.0 250.0 5.0 0.0 1.0 0.0 0.0 0.0 756.0" in lines
    assert "– m0 500.0 250.0 5.0 0.0 1.0 0.0 0.0 0.0 900.0" in lines
    assert "p0 prefill 700 2 0 32 90 1234 –" in lines


def test_every_part_of_a_cost_that_routers_tell_is_documented_and_shown() -> None:
    option = option_of(d(), None, "", 0.0, Cost())
    plan = Plan(decode=WorkerId("d0"), prefill=None, reason="", options=(option,))
    told = decision(plan)["options"][0]["cost"]
    assert set(told) == set(RoutingCost.__annotations__) == {*route._PARTS, "total_s"}


def test_a_decision_with_bare_scores() -> None:
    options = [{"prefill": None, "decode": "m0", "score": -4.5}]
    lines = shown_route(FOUND | {"options": options, "prefill": None, "decode": "m0", "sources": [], "policy": "llm_d"})
    assert "chosen m0: least" in lines
    assert "PREFILL DECODE SCORE" in lines
    assert "– m0 -4.5" in lines


def test_one_prompt_from_one_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "prompt"
    file.write_text("from a file")
    assert route._prompt("a text", "", None) == "a text"
    assert route._prompt("", "17, 4,256", None) == [17, 4, 256]
    assert route._prompt("", "", file) == "from a file"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"from a pipe")))
    assert route._prompt("-", "", None) == "from a pipe"
    for wrong in (("", "", None), ("a", "1", None), ("a", "", file)):
        with pytest.raises(ConfigError, match="give one prompt"):
            route._prompt(*wrong)
    with pytest.raises(ConfigError, match="--tokens is 'one,two'"):
        route._prompt("", "one,two", None)
    with pytest.raises(ConfigError, match="cannot read the prompt"):
        route._prompt("", "", tmp_path / "none")
    file.write_bytes(b"\xff")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    for odd in (("", "", file), ("-", "", None)):
        with pytest.raises(ConfigError, match="cannot read the prompt: it is not UTF-8 text"):
            route._prompt(*odd)


WORKER = {"is_connected": True, "is_registered": True, "model": "m", "role": "decode"}


def desired(**counts: int) -> dict[str, Any]:
    return {"pools": [{"model": "m", "role": role, "count": count} for role, count in counts.items()]}


def shown(rows: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    Console(width=120, file=text).print(status_view.pools({"pools": rows}))
    return text.getvalue()


def test_wanted_stands_beside_what_is_there() -> None:
    rows = with_wanted([pool_of("m", "decode", [WORKER])], desired(prefill=1, decode=2, mixed=0))
    assert [(row["role"], row["wanted"], row["workers"], row["ready"]) for row in rows] == [
        ("decode", 2, 1, 1), ("prefill", 1, 0, 0),
    ]  # fmt: skip
    assert "WANTED" in shown(rows)
    assert "1/1" in shown(rows)


def test_what_is_there_and_not_wanted_is_0_and_nobody_who_says_what_is_wanted_is_nothing() -> None:
    pools = [pool_of("m", "decode", [WORKER])]
    assert [row["wanted"] for row in with_wanted(pools, desired(prefill=1, decode=0))] == [0, 1]
    assert with_wanted(pools, {}) == pools
    assert "WANTED" not in shown(with_wanted(pools, {}))


ROOM = "for a place: needs 2 CPU on one node: 10.0.0.2 has 1 of 2 CPU free"


def event(time_s: float, kind: str, reason: str = "", subject: str = "decode-1") -> dict[str, Any]:
    return {"time_s": time_s, "kind": kind, "subject": subject, "reason": reason}


WAITS = [event(1, "started"), event(2, "waiting", ROOM), event(3, "exited"), event(3, "restart_planned")]


@pytest.mark.parametrize(
    ("events", "why"),
    [
        ([], ""),
        (WAITS[:2], f"waits {ROOM}"),
        (WAITS, f"waits {ROOM}"),
        ([*WAITS, event(9, "waiting", "for a place: no node has joined")], "waits for a place: no node has joined"),
        ([*WAITS, event(9, "started", "it has a place on 10.0.0.3")], ""),
        ([*WAITS, event(9, "stopping")], ""),
        ([event(2, "waiting", "no room for 1 more ranks under max_ranks")], ""),
        ([event(2, "waiting", ROOM, "decode-2")], ""),
    ],
)
def test_what_a_worker_waits_for(events: list[dict[str, Any]], why: str) -> None:
    unplaced = Unplaced()
    unplaced.hear(events)
    assert unplaced.why("decode-1") == why
    if why:
        assert unplaced.since_s("decode-1") == 2


class Admin:
    """Decode-1 is wanted and not there."""

    def __init__(self, events: list[dict[str, Any]] | None) -> None:
        self._events = events

    def status(self) -> dict[str, Any]:
        up = {"worker": "decode-0", "is_connected": True, "is_registered": True, "model": "m", "role": "decode"}
        return {"is_ready": True, "workers": [up]}

    def metrics(self) -> str:
        return ""

    def desired(self) -> dict[str, Any]:
        members = [{"worker_id": f"decode-{number}"} for number in range(2)]
        return {"desired": {"pools": [{"model": "m", "role": "decode", "count": 2}], "members": members}}

    def events(self, *, count: int) -> dict[str, Any]:
        if self._events is None:
            raise UnavailableError("Redis does not answer")
        return {"events": self._events[-count:], "next": "1"}


def test_status_warns_of_workers_that_wait_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 44.4)
    found = status.look(Admin(WAITS))  # type: ignore[arg-type]
    assert [warning["what"] for warning in found["warnings"]] == [f"decode-1 waits {ROOM}, for 42 s"]
    assert "join a machine" in found["warnings"][0]["fix"]
    assert found["health"] == "degraded"


@pytest.mark.parametrize("events", [None, []])
def test_without_events_nothing_is_made_up(events: list[dict[str, Any]] | None) -> None:
    assert status.look(Admin(events))["warnings"] == []  # type: ignore[arg-type]
