"""Test changes by `clusterctl`: the preview, the wait and the completion."""

from dataclasses import asdict
from typing import Any, cast

import pytest

from tandem.clusterctl.operate import desired_state_update, rollout_view, wait
from tandem.clusterctl.operate.desired_state_update import ApplyOptions, carry_out, lines_of
from tandem.clusterctl.operate.wait import is_same_wish, restarting, state_of, unsettled
from tandem.clusterctl.output import Output
from tandem.core.desired import DesiredState, Pool
from tandem.core.desired_changes import changes, cordoned, with_scale
from tandem.core.errors import ConflictError, DeadlineError, UnavailableError
from tandem.core.state_enums import RoleName

STATE = DesiredState(version=1, pools=(Pool(name="mixed", model="m", role=RoleName.MIXED, count=2),)).filled()


def found(after: DesiredState) -> dict[str, Any]:
    rows = [{**asdict(change), "deed": change.deed.value} for change in changes(STATE, after)]
    return {"before": asdict(STATE), "after": asdict(after), "changes": rows}


def test_the_deadline_of_a_drain_is_shown_as_what_it_is() -> None:
    drained = cordoned(STATE, "mixed-1", is_cordoned=True)
    assert lines_of(found(drained)) == ["~ mixed-1: drain (no new work)"]
    assert lines_of(found(cordoned(STATE, "mixed-1", is_cordoned=True, deadline_s=4.5))) == [
        "~ mixed-1: drain (no new work; what still runs after 4.5 s moves to other workers)"
    ]


def test_counts_that_change_stand_below_the_workers() -> None:
    assert lines_of(found(with_scale(STATE, {RoleName.MIXED: 3}, {}))) == [
        "+ mixed-2: start (as mixed in mixed)",
        "  mixed 2 → mixed 3",
    ]


class Admin:
    """Takes every request for a third worker, and then returns the next state at each look: versions of the desired
    state with the workers that are ready, or nothing at all (None). The last is returned for ever."""

    def __init__(self, *seen: tuple[int, int] | None) -> None:
        self._seen, self.looks, self.written = list(seen), 0, list[dict[str, Any]]()
        self.happened: list[dict[str, Any]] = []

    def propose(self, wanted: dict[str, Any]) -> dict[str, Any]:
        after = asdict(with_scale(STATE, {RoleName.MIXED: 3}, {}))
        return found(with_scale(STATE, {RoleName.MIXED: 3}, {})) | {"is_changed": True, "after": after | {"version": 2}}

    def write_desired(self, state: dict[str, Any]) -> None:
        self.written.append(state)

    def desired(self) -> dict[str, Any]:
        seen = self._seen[min(self.looks, len(self._seen) - 1)]
        self.looks += 1
        if seen is None:
            raise UnavailableError("no cluster answers at http://admin")
        return {"desired": {"version": seen[0]}}

    def events(self, *, after: str, count: int) -> dict[str, Any]:
        first = int(after or 0)
        return {"events": self.happened[first : first + count], "next": str(len(self.happened))}

    def status(self) -> dict[str, Any]:
        seen = self._seen[min(max(0, self.looks - 1), len(self._seen) - 1)] or (2, 2)
        up = {"is_connected": True, "state": "ready", "role": "mixed", "is_registered": True, "incarnation": "1"}
        return {"workers": [{"worker": f"mixed-{number}", **up} for number in range(seen[1])]}


def change(admin: Admin, timeout_s: float = 60.0) -> None:
    carry_out(admin, {"verb": "scale"}, ApplyOptions(yes=True, timeout=timeout_s), Output())  # type: ignore[arg-type]


def test_an_admin_port_that_is_away_for_a_while_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    admin = Admin((2, 2), None, None, (2, 2), (2, 3))
    change(admin)
    assert (admin.looks, len(admin.written)) == (5, 1)
    said = capsys.readouterr()
    assert said.out.startswith("+ mixed-2: start")
    assert said.err.splitlines() == ["mixed-2 is absent", "the admin port does not answer", "mixed-2 is absent"]


def test_one_that_stays_away_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(wait, "_QUIET_S", 0.0)
    with pytest.raises(UnavailableError, match="no cluster answers"):
        change(Admin((2, 2), None))
    assert capsys.readouterr().out == "", "nobody knows what became of it"


def test_the_record_of_somebody_else_ends_the_wait() -> None:
    admin = Admin((2, 2), (3, 3))
    with pytest.raises(ConflictError, match="version 2 was written here, and there is version 3"):
        change(admin)
    assert admin.looks == 2


def test_the_time_to_wait_is_bounded() -> None:
    with pytest.raises(
        DeadlineError, match=r"the cluster is not as desired after 0\.05 s: mixed-2 is absent\. It goes on"
    ):
        change(Admin((2, 2)), timeout_s=0.05)


def test_a_worker_without_a_place_says_at_once_what_it_waits_for_and_how_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(desired_state_update, "_LOOK_AT_EVENTS_S", 0.0)
    missing = "for a place: needs 2 CPU on one node: 10.0.0.2 has 1 of 2 CPU free"
    admin = Admin((2, 2))
    admin.happened = [
        {"time_s": 1.0, "kind": "started", "subject": "mixed-2", "reason": "mixed is to have 3"},
        {"time_s": 2.0, "kind": "waiting", "subject": "mixed-2", "reason": missing},
        {"time_s": 3.0, "kind": "exited", "subject": "mixed-2", "reason": "it got no place within 1 s"},
    ]
    said = f"mixed-2 waits {missing}; room is waited for up to 0.3 s here (--timeout)"
    with pytest.raises(DeadlineError) as caught:
        change(admin, timeout_s=0.3)
    assert said in caught.value.message
    assert capsys.readouterr().err.splitlines() == [said]


def member(name: str, role: str, **more: Any) -> dict[str, Any]:
    return {"worker_id": name, "role": role, "is_cordoned": False, **more}


def row(name: str, role: str, **more: Any) -> dict[str, Any]:
    known = {"worker": name, "role": role, "is_connected": True, "is_registered": True, "incarnation": "7"}
    return {**known, "in_flight": 0, **more}


WANTED = {"members": [member("p", "prefill"), member("d", "decode", is_cordoned=True)]}

DRAINED = row("d", "decode", state="drained")


def test_what_is_as_wished_is_settled() -> None:
    assert unsettled(WANTED, [row("p", "prefill"), DRAINED], {}) == []


@pytest.mark.parametrize(
    ("rows", "missing"),
    [
        ([row("p", "prefill")], "d is absent"),
        ([row("p", "decode"), DRAINED], "p is decode and not prefill"),
        ([row("p", "prefill", state="draining"), DRAINED], "p is draining"),
        ([row("p", "prefill", is_registered=False), DRAINED], "p is unregistered"),
        ([row("p", "prefill", is_connected=False), DRAINED], "p is unreachable"),
        ([row("p", "prefill"), row("d", "decode", in_flight=2)], "d has 2 requests"),
        ([row("p", "prefill"), row("d", "decode", state="drained", in_flight=1)], "d has 1 requests"),
        ([row("p", "prefill"), row("d", "decode", state="draining")], "d is draining"),
        ([row("p", "prefill"), row("d", "decode", state="ready")], "d is ready"),
        ([row("p", "prefill"), DRAINED, row("x", "decode")], "x is still there"),
    ],
)
def test_what_is_missing_is_named(rows: list[dict[str, Any]], missing: str) -> None:
    assert unsettled(WANTED, rows, {}) == [missing]


def test_a_restart_is_over_when_the_worker_is_another() -> None:
    anew = restarting([{"deed": "restart", "worker_id": "p"}, {"deed": "stop", "worker_id": "q"}], {"p": "7", "q": "8"})
    assert anew == {"p": "7"}
    assert unsettled(WANTED, [row("p", "prefill"), DRAINED], anew) == ["p has not started anew"]
    assert unsettled(WANTED, [row("p", "prefill", incarnation="9"), DRAINED], anew) == []


def test_states_in_one_word() -> None:
    assert state_of(None) == "absent"
    assert state_of(row("p", "prefill", is_connected=False, is_registered=False)) == "gone"
    assert state_of(row("p", "prefill")) == "ready"


def test_a_wish_is_the_same_while_others_take_the_places_of_its_workers() -> None:
    """On Kubernetes `decode-2` becomes a pod with a name of its own."""
    pools = [{"name": "decode", "count": 2}]
    members = [member("d", "decode", pool="a"), member("e", "decode", pool="a")]
    first = {"version": 3, "pools": pools, "members": members}
    others = [members[0], member("pod-x", "decode", pool="a")]
    later = {**first, "version": 4, "members": others}
    assert is_same_wish(first, {**first, "version": 5})
    assert is_same_wish(first, later)
    for other in (
        {**later, "pools": [{"name": "decode", "count": 3}]},
        {**later, "members": [*others, member("f", "decode", pool="a")]},
        {**later, "members": [member("d", "decode", pool="a"), member("pod-x", "prefill", pool="a")]},
        {**later, "members": [member("d", "decode", pool="a", is_cordoned=True), member("pod-x", "decode", pool="a")]},
    ):
        assert not is_same_wish(first, other)


def test_it_waits_on_while_no_model_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[list[dict[str, Any]]] = [[], [{"model": "m", "revision": "r2", "phase": "complete"}]]
    monkeypatch.setattr(rollout_view, "look", lambda admin, model: {"items": answers.pop(0)})
    monkeypatch.setattr(wait, "_POLL_S", 0.0)
    rollout_view.wait(cast(Any, None), "", 10.0)
    assert answers == []
