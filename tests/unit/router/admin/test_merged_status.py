"""Workers as several processes of a router see them."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.router.admin.merged_status import workers_of


def row(worker: str = "d0", **said: Any) -> dict[str, Any]:
    fine = {"is_connected": True, "is_registered": True, "state": "ready", "trouble": "", "breaker": "closed"}
    return {"worker": worker, "incarnation": "7", "router_in_flight": 0, **fine, **said}


def together(*rows: dict[str, Any]) -> dict[str, Any]:
    (found,) = workers_of([{"workers": [one]} for one in rows])
    return found


HEARD: dict[str, Any] = {"role": "decode", "in_flight": 3}
AWAY: dict[str, Any] = {"is_connected": False, "state": "unreachable"}


def test_requests_are_added_and_what_the_worker_reported_is_not() -> None:
    found = together(row(router_in_flight=2, **HEARD), row(router_in_flight=1, **HEARD))
    assert (found["router_in_flight"], found["in_flight"]) == (3, 3)


@pytest.mark.parametrize(
    ("states", "shown"),
    [
        (("closed", "open"), "open"),
        (("open", "half_open"), "open"),
        (("half_open", "closed"), "half_open"),
        (("closed", "closed"), "closed"),
    ],
)
def test_an_open_breaker_of_one_is_seen(states: tuple[str, ...], shown: str) -> None:
    assert together(*(row(breaker=state) for state in states))["breaker"] == shown


@pytest.mark.parametrize("is_first", [True, False])
def test_a_worker_that_one_cannot_reach_is_not_ready_and_what_it_told_the_other_is_kept(*, is_first: bool) -> None:
    rows = [row(**AWAY, trouble="refused", router_in_flight=1), row(**HEARD, router_in_flight=4)]
    found = together(*(rows if is_first else reversed(rows)))
    assert (found["is_connected"], found["state"], found["trouble"]) == (False, "unreachable", "refused")
    assert (found["role"], found["in_flight"], found["router_in_flight"]) == ("decode", 3, 5)


def test_it_is_gone_when_nobody_sees_it_registered() -> None:
    gone = row(is_connected=False, is_registered=False, state="gone")
    assert together(gone, gone)["state"] == "gone"
    found = together(gone, row(**HEARD))
    assert (found["is_registered"], found["state"]) == (True, "unreachable")


def test_who_drains_for_one_drains() -> None:
    assert together(row(**HEARD), row(**HEARD, state="draining"))["state"] == "draining"


def test_a_worker_of_one_process_alone_is_among_the_others() -> None:
    pages: list[dict[str, Any]] = [
        {"workers": [row("d1")]},
        {"workers": [row("d0"), row("d1", router_in_flight=1)]},
        {"workers": []},
    ]
    assert [(one["worker"], one["router_in_flight"]) for one in workers_of(pages)] == [("d0", 0), ("d1", 1)]
