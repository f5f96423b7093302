"""`clusterctl kv audit` against a real router with real ranks behind it: clean under load, leaks named, fences kept."""

import json
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.clusterctl import main as program
from tandem.core.config import Disaggregation
from tandem.core.ids import Attempt, BlockId, GroupId, RequestId, TransferId, WorkerId
from tandem.core.ledger import Holder, HoldKind
from tandem.kvtransfer.ticket import GroupBlocks, Ticket
from tests.integration.router.house import ADMIN_KEY, RouterHarness, builder
from tests.integration.worker.pair import shape_in
from tests.integration.worker.rank_worker import ServedPair

LEAK = Holder(HoldKind.RESERVED, "chatcmpl-lost#1/4711")


@dataclass
class Setting:
    """A test router with a served pair in it, and the program run against its admin port."""

    house: RouterHarness
    pair: ServedPair
    monkeypatch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]
    key_file: Path

    def audit(self, *flags: str) -> tuple[int, str]:
        """(exit code, what it printed)."""
        return _audit(self.house, self.key_file, self.monkeypatch, self.capsys, *flags)

    def records(self, *flags: str) -> tuple[int, dict[str, Any]]:
        code, out = self.audit("--json", *flags)
        return code, json.loads(out)

    def plant(self, holder: Holder, blocks: int = 3) -> list[BlockId]:
        """Take blocks that are never given back."""
        ledger = self.pair.d.context.engine.ledgers[0]
        taken = self.pair.call(lambda: ledger.allocate(holder, blocks))
        assert isinstance(taken, list)
        return taken

    def age(self, holder: Holder, seconds: float = 10.0) -> None:
        """Let a hold be older than it is."""
        ledger = self.pair.d.context.engine.ledgers[0]

        def turn_back() -> None:
            ledger._since_s[holder] -= seconds

        self.pair.call(turn_back)


@pytest.fixture
def setting(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Setting]:
    shape = shape_in(folder / "tandem-tiny")
    ranks = folder / "ranks"
    ranks.mkdir()
    with builder(folder) as build:
        house = build(prefill=0, decode=0, start=False, mode=Disaggregation.ALWAYS)
        pair = ServedPair(ranks, shape, house.secret, engine="sim", transport="shm", chunk_tokens=64)
        house.workers.update(pair.workers)  # type: ignore[arg-type]
        with pair.running():
            house.start()
            house.wait_ready()
            yield Setting(house, pair, monkeypatch, capsys, folder / "key")
    pair.close()


def test_a_healthy_cluster_under_load_is_explained(setting: Setting) -> None:
    is_over = threading.Event()
    answers: list[int] = []

    def load(number: int) -> None:
        while not is_over.is_set():
            body = {"model": "tiny", "prompt": f"{number} " * 60, "max_tokens": 40, "temperature": 0}
            answers.append(httpx.post(f"{setting.house.url}/v1/completions", json=body, timeout=60).status_code)

    threads = [threading.Thread(target=load, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    try:
        seen: set[str] = set()
        for _ in range(10):
            code, found = setting.records()
            assert (code, found["unexplained"], found["unanswered"]) == (0, [], [])
            seen |= {hold["kind"] for hold in found["holds"]}
            for worker in found["workers"]:
                for group in worker["groups"]:
                    states = sum(group[state] for state in ("free", "cached", "request", "pushing", "reserved"))
                    assert states == group["total"]
    finally:
        is_over.set()
        for thread in threads:
            thread.join(60)
    assert "request" in seen
    assert answers
    assert set(answers) == {200}
    setting.pair.wait(lambda: setting.pair.p.is_at_rest() and setting.pair.d.is_at_rest())
    code, out = setting.audit()
    assert code == 0
    assert "all 0 holds of blocks are explained" in out


@pytest.mark.parametrize(
    ("holder", "why"),
    [
        (LEAK, "the role has no such reservation"),
        (Holder(HoldKind.PUSHING, "chatcmpl-lost#1/4711"), "its transfer is not open in the sender"),
        (Holder(HoldKind.REQUEST, "chatcmpl-lost#1#0"), "the worker knows no such request"),
        (Holder(HoldKind.RESERVED, "who knows"), "the role has no such reservation"),
    ],
)
def test_a_leak_is_named_and_ends_with_1(setting: Setting, holder: Holder, why: str) -> None:
    blocks = setting.plant(holder)
    code, found = setting.records("--wait", "0.1")
    assert code == 7
    (hold,) = found["unexplained"]
    assert (hold["worker"], hold["group"], hold["kind"]) == ("d0", 0, holder.kind.name.lower())
    assert (hold["key"], hold["blocks"], hold["unchanged_blocks"]) == (holder.key, blocks, sorted(blocks))
    assert why in hold["why"]
    code, out = setting.audit("--wait", "0.1")
    assert code == 7
    assert f"unexplained: d0 group 0 {holder.kind.name.lower()} {holder.key}, blocks" in out
    assert "3 blocks are held and nothing explains it" in out
    setting.pair.call(lambda: setting.pair.d.context.engine.ledgers[0].release(holder))
    assert setting.audit()[0] == 0


def test_a_hold_that_changes_hands_between_the_looks_is_no_leak(setting: Setting) -> None:
    """Given back and taken again under the same name: since another moment, so it is another hold."""
    setting.plant(LEAK)
    ledger = setting.pair.d.context.engine.ledgers[0]

    def renew() -> None:
        ledger.release(LEAK)
        ledger.allocate(LEAK, 3)

    from tandem.clusterctl.admin_client import AdminClient
    from tandem.clusterctl.kv import audit

    with AdminClient(setting.house.admin_url, setting.key_file) as admin:
        findings = audit.run(admin, 0.1, sleep=lambda _: setting.pair.call(renew))
    assert audit.exit_code(findings) == 0


def test_repair_releases_what_is_fenced_and_prints_it(setting: Setting) -> None:
    blocks = setting.plant(LEAK)
    code, out = setting.audit("--wait", "0.1", "--repair", "--yes")
    assert code == 7, "younger than a lease: the worker refuses"
    assert "not released: d0 group 0 reserved chatcmpl-lost#1/4711: it is younger than a lease" in out
    setting.age(LEAK)
    code, found = setting.records("--wait", "0.1", "--repair", "--yes")
    assert code == 0
    assert [hold["blocks"] for hold in found["released"]] == [blocks]
    setting.pair.call(setting.pair.d.check_baseline)
    assert setting.audit()[0] == 0


def test_repair_is_refused_while_bytes_may_move(setting: Setting) -> None:
    """A reservation that the role lost, but with an open transfer: a release would let a write hit freed blocks."""
    d = setting.pair.d
    (block, *_) = setting.plant(LEAK)
    ticket = Ticket(
        transfer=TransferId(4711), request=RequestId("chatcmpl-lost"), attempt=Attempt(1), sender=WorkerId("p0"),
        sender_incarnation=setting.pair.p.incarnation, receiver=WorkerId("d0"), receiver_incarnation=d.incarnation,
        groups=(GroupBlocks(group=GroupId(0), skip=0, blocks=(block,)),), endpoints=(),
        layout=d.context.profile.layout,
    )  # fmt: skip
    setting.pair.call(lambda: d.context.receiver.expect(ticket))
    setting.age(LEAK)
    code, found = setting.records("--wait", "0.1", "--repair", "--yes")
    assert (code, found["released"], found["refused"]) == (7, [], []), "it is not even offered"
    assert not found["unexplained"][0]["is_fenced"]
    answer = _repair(setting, found["unexplained"])
    assert "its transfer is open in the receiver" in answer["refused"][0]["why"]
    setting.pair.call(lambda: d.context.receiver.cancel(TransferId(4711)))
    assert _repair(setting, found["unexplained"])["released"], "fenced now"


def test_repair_is_refused_for_what_is_known_or_not_the_same(setting: Setting) -> None:
    setting.plant(LEAK)
    setting.age(LEAK)
    (hold,) = setting.records("--wait", "0")[1]["unexplained"]
    for change, why in (
        ({"incarnation": "17"}, "this worker is now"),
        ({"since_s": hold["since_s"] + 1}, "no holder of this name has had these blocks"),
        ({"blocks": hold["blocks"][:2]}, "no holder of this name has had these blocks"),
        ({"kind": "nonsense"}, "no holder of this name has had these blocks"),
        ({"group": 9}, "no holder of this name has had these blocks"),
        ({"worker": "d9"}, "the worker is not here"),
    ):
        answer = _repair(setting, [hold | change])
        assert answer["released"] == []
        assert why in answer["refused"][0]["why"]
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    wrong = [hold | change for change in ({"blocks": [-1]}, {"incarnation": -1}, {"incarnation": str(1 << 64)})]
    for body in ({}, {"holds": [{"worker": "d0"}]}, {"holds": 3}, *({"holds": [one]} for one in wrong)):
        refusal = httpx.post(f"{setting.house.admin_url}/admin/v1/kv/repair", json=body, headers=headers)
        assert (refusal.status_code, refusal.json()["error"]["code"]) == (400, "invalid_request")
    endless = json.dumps({"holds": [hold | {"group": float("inf")}]})
    assert httpx.post(f"{setting.house.admin_url}/admin/v1/kv/repair", content=endless, headers=headers).is_client_error
    assert httpx.post(f"{setting.house.admin_url}/admin/v1/kv/repair", json={"holds": []}).status_code == 401
    assert len(_repair(setting, [hold])["released"]) == 1


def test_a_dead_worker_is_named_and_ends_with_2(setting: Setting) -> None:
    setting.house.kill_worker("d0")
    setting.house.wait(lambda: not setting.house.router.table.link(WorkerId("d0")).is_up)  # type: ignore[union-attr]
    code, out = setting.audit("--wait", "0.1")
    assert code == 1
    assert "not asked: d0:" in out
    assert "not every worker could be asked" in out


def test_a_worker_that_stands_still_is_named(setting: Setting) -> None:
    """Its host answers pings, its rank runs no turn: no report comes."""
    held, go_on = threading.Event(), threading.Event()

    def stand() -> None:
        held.set()
        assert go_on.wait(60)

    standing = threading.Thread(target=lambda: setting.pair.call(stand, 90))
    standing.start()
    assert held.wait(60)
    try:
        code, found = setting.records("--wait", "0")
    finally:
        go_on.set()
        standing.join(60)
    assert code == 1
    assert {missing["worker"] for missing in found["unanswered"]} == {"p0", "d0"}
    assert "no report came within 3 s" in found["unanswered"][0]["why"]


def test_before_any_worker_has_come_nobody_has_reported(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with builder(folder) as build:
        house = build(prefill=0, decode=0, start=False)
        house.start()
        code, out = _audit(house, folder / "key", monkeypatch, capsys)
    assert code == 3
    assert out.startswith("no worker reported")


def _audit(
    house: RouterHarness,
    key_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *flags: str,
) -> tuple[int, str]:
    """`clusterctl kv audit`: (exit code, what it printed)."""
    arguments = ["clusterctl", "kv", "audit", "--endpoint", house.admin_url, "--admin-key-file", str(key_file)]
    monkeypatch.setattr(sys, "argv", [*arguments, *flags])
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        program.main()
    return int(ended.value.code or 0), capsys.readouterr().out


def _repair(setting: Setting, holds: list[dict[str, Any]]) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    answer = httpx.post(f"{setting.house.admin_url}/admin/v1/kv/repair", json={"holds": holds}, headers=headers)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())
