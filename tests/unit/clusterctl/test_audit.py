"""Two looks compared, exit codes, and the page for people."""

import io
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tandem.clusterctl import main as program
from tandem.clusterctl.exit_codes import Exit
from tandem.clusterctl.kv import audit
from tandem.clusterctl.kv.audit import Findings, find_unexplained

HOLD: dict[str, Any] = {
    "worker": "d0", "incarnation": "22", "group": 0, "kind": "reserved", "key": "r#1/7", "since_s": 5.0, "age_s": 9.0,
    "blocks": [3, 4, 5, 9], "verdict": "suspect", "why": "nobody knows it", "peer": "p0", "peer_incarnation": "11",
    "is_fenced": True,
}  # fmt: skip


def look(*holds: dict[str, Any], unanswered: tuple[str, ...] = ()) -> dict[str, Any]:
    group = {"group": 0, "total": 9, "free": 1, "cached": 2, "request": 3, "pushing": 1, "reserved": 2}
    workers = [{"worker": "d0", "role": "decode", "groups": [group]}]
    missing = [{"worker": worker, "why": "it is gone"} for worker in unanswered]
    return {"workers": workers, "unanswered": missing, "holds": list(holds)}


class Admin:
    """Gives prepared looks, and remembers what it should repair."""

    def __init__(self, *looks: dict[str, Any]) -> None:
        self.looks, self.repaired = list(looks), []  # type: ignore[var-annotated]

    def audit(self) -> dict[str, Any]:
        return self.looks.pop(0)

    def repair(self, holds: Any) -> dict[str, Any]:
        self.repaired = list(holds)
        return {"released": self.repaired, "refused": []}


def run(*looks: dict[str, Any], is_repairing: bool = False) -> tuple[Findings, list[float], Admin]:
    admin, slept = Admin(*looks), []  # type: ignore[var-annotated]
    findings = audit.run(admin, 3.0, sleep=slept.append)  # type: ignore[arg-type]
    if is_repairing:
        findings = audit.repaired(admin, findings)  # type: ignore[arg-type]
    return findings, slept, admin


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (["--endpoint", "nonsense", "--admin-key-file", "/dev/null"], 1),  # the router could not be asked
        (["--endpoint", "http://127.0.0.1:9", "--admin-key-file", "/dev/null"], 1),
        (["--name", "nowhere"], 1),
        (["--wait", "-1"], 2),
        (["--repairr"], 2),
        (["--repair", "--name", "nowhere"], 2),  # before it looks: there is no worker to ask
        (["--repair", "--dry-run", "--name", "nowhere"], 1),
    ],
)
def test_a_router_that_cannot_be_asked_ends_with_1_and_wrong_usage_with_2(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    flags: list[str],
    code: int,
) -> None:
    monkeypatch.setenv("TANDEM_STATE_DIR", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["clusterctl", "kv", "audit", *flags])
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert ended.value.code == code
    assert capsys.readouterr().err


def test_a_clean_look_is_enough() -> None:
    findings, slept, _ = run(look(HOLD | {"verdict": "explained"}))
    assert (audit.exit_code(findings), slept) == (0, [])


def test_what_stays_is_unexplained_and_what_went_is_not() -> None:
    findings, slept, _ = run(look(HOLD), look(HOLD))
    assert (audit.exit_code(findings), slept) == (Exit.UNHEALTHY, [3.0])
    for later in (
        look(),
        look(HOLD | {"verdict": "explained"}),
        look(HOLD | {"since_s": 6.0}),
        look(HOLD | {"incarnation": "23"}),
        look(HOLD | {"blocks": [1, 2]}),
        look(HOLD | {"key": "r#1/8"}),
    ):
        assert audit.exit_code(run(look(HOLD), later)[0]) == 0


def test_who_was_not_asked_leaves_doubt_but_a_leak_is_certain() -> None:
    assert audit.exit_code(run(look(unanswered=("p0",)))[0]) == Exit.FAILED
    assert audit.exit_code(run(look(HOLD), look(HOLD, unanswered=("p0",)))[0]) == Exit.UNHEALTHY


def test_only_the_fenced_are_repaired() -> None:
    other = HOLD | {"key": "r#2/8", "is_fenced": False}
    findings, _, admin = run(look(HOLD, other), look(HOLD, other), is_repairing=True)
    assert [hold["key"] for hold in admin.repaired] == ["r#1/7"]
    assert audit.exit_code(findings) == Exit.UNHEALTHY
    assert [hold["key"] for hold in findings.left] == ["r#2/8"]
    findings, _, _ = run(look(HOLD), look(HOLD), is_repairing=True)
    assert audit.exit_code(findings) == 0
    _, _, admin = run(look(HOLD), look(HOLD))
    assert admin.repaired == [], "not without being told to"


def test_nobody_at_all_is_no_clean_audit() -> None:
    nobody: dict[str, Any] = {"workers": [], "unanswered": [], "holds": []}
    findings, slept, _ = run(nobody)
    assert (audit.exit_code(findings), slept) == (Exit.NOT_FOUND, [])
    text = io.StringIO()
    audit.show(findings, Console(file=text, width=120))
    assert text.getvalue().startswith("no worker reported: none is connected")
    assert "explained" not in text.getvalue()
    lost = nobody | {"unanswered": [{"worker": "p0", "why": "it is gone"}]}
    assert audit.exit_code(run(lost)[0]) == Exit.FAILED, "there is somebody, who did not answer"


@given(st.sets(st.integers(0, 9)), st.sets(st.integers(0, 9)))
def test_only_blocks_held_both_times_count(before: set[int], after: set[int]) -> None:
    found = find_unexplained(look(HOLD | {"blocks": list(before)}), look(HOLD | {"blocks": list(after)}))
    assert [hold["unchanged_blocks"] for hold in found] == ([sorted(before & after)] if before & after else [])


@given(st.sets(st.integers(0, 60)))
def test_ranges_name_every_block_once(blocks: set[int]) -> None:
    named: list[int] = []
    for part in filter(None, audit.ranges(blocks).split(", ")):
        first, _, last = part.partition("–")
        named += range(int(first), int(last or first) + 1)
    assert named == sorted(blocks)


def test_the_page_says_who_what_and_why() -> None:
    findings = Findings(
        look=look(HOLD, HOLD | {"verdict": "unknown", "why": "p0 did not answer"}, unanswered=("p0",)),
        unexplained=[HOLD | {"unchanged_blocks": [3, 4, 5, 9]}],
        released=[{"worker": "d0", "group": 0, "kind": "reserved", "key": "r#9/9", "blocks": [8]}],
        refused=[{"worker": "d0", "group": 0, "kind": "reserved", "key": "r#8/8", "blocks": [7], "why": "too young"}],
    )
    text = io.StringIO()
    audit.show(findings, Console(file=text, width=100))
    for words in (
        "d0      decode  0           9     1       2        3        1         2",
        "not asked: p0: it is gone",
        "not known: d0 group 0 reserved r#1/7, blocks 3–5, 9, for 9.0 s, peer p0 (11): p0 did not answer",
        "unexplained: d0 group 0 reserved r#1/7, blocks 3–5, 9, for 9.0 s, peer p0 (11): nobody knows it (fenced",
        "released: d0 group 0 reserved r#9/9, blocks 8",
        "not released: d0 group 0 reserved r#8/8: too young",
        "4 blocks are held and nothing explains it",
    ):
        assert words in text.getvalue(), text.getvalue()


@pytest.mark.parametrize("is_equal", [True, False])
def test_a_worker_that_the_index_shows_wrongly_is_named(is_equal: bool) -> None:
    seen = look()
    seen["workers"][0]["index"] = {"held_blocks": 12, "known_blocks": 9, "is_equal": is_equal}
    out = io.StringIO()
    audit.show(Findings(look=seen, unexplained=[]), Console(file=out, width=200))
    assert ("index: d0 holds 12 cached blocks, the router knows of 9" in out.getvalue()) is not is_equal
