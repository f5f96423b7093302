"""Completion of a change, judged by the admin port's answers."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.clusterctl.operate.wait import is_same_wish, restarting, state_of, unsettled


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
