"""How a change is shown before anybody agrees to it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from tandem.clusterctl.changing.wishing import lines_of
from tandem.core.desired import DesiredState, Pool
from tandem.core.lifecycle import RoleName
from tandem.core.wishes import changes, cordoned, scaled

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
    assert lines_of(found(scaled(STATE, {RoleName.MIXED: 3}, {}))) == [
        "+ mixed-2: start (as mixed in mixed)",
        "  mixed 2 → mixed 3",
    ]
