"""Waits until the cluster is as desired, by the admin port's reports of desired and observed state."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tandem.clusterctl.output import note
from tandem.core.errors import DeadlineError, UnavailableError

_POLL_S = 0.1
_QUIET_S = 10.0
"""The admin port may be away for so long while we wait."""
Row = Mapping[str, Any]


def wait_until(look: Callable[[], list[str]], timeout_s: float, unmet: str) -> None:
    """Call `look` until it returns no difference; the first one is printed whenever it changes. DeadlineError `unmet`
    after `timeout_s`, UnavailableError if the admin port does not answer for a while."""
    ends_s, heard_s, told = time.monotonic() + timeout_s, time.monotonic(), ""
    while True:
        try:
            missing = look()
            heard_s = time.monotonic()
        except UnavailableError:
            if time.monotonic() - heard_s > _QUIET_S:
                raise
            missing = ["the admin port does not answer"]
        if not missing:
            return
        if time.monotonic() > ends_s:
            why, todo = "; ".join(missing[:4]), "it goes on; look at `clusterctl events`"
            raise DeadlineError(f"{unmet} after {timeout_s:g} s", why=why, todo=todo)
        if missing[0] != told:
            told = missing[0]
            note(told + (f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""))
        time.sleep(_POLL_S)


def restarting(changes: Sequence[Row], lives: Mapping[str, str]) -> dict[str, str]:
    """Return workers that are to start anew, with the incarnation that has to end."""
    return {row["worker_id"]: lives.get(row["worker_id"], "") for row in changes if row["deed"] == "restart"}


def unsettled(desired: Row, workers: Sequence[Row], anew: Mapping[str, str]) -> list[str]:
    """Return the differences from `desired`, one line each; `workers`: of the status; `anew`: see `restarting`."""
    rows = {str(row["worker"]): row for row in workers}
    members = {str(member["worker_id"]): member for member in desired["members"]}
    missing = [line for name, member in members.items() if (line := _lacking(member, rows.get(name), anew.get(name)))]
    return missing + [f"{name} is still there" for name in rows if name not in members]


def is_same_wish(wanted: Row, now: Row) -> bool:
    """True if a later record wants the same, with other workers in the places of some: on Kubernetes a pod takes the
    place of the desired worker, or of one that lost its pod."""
    frames = [
        {key: value for key, value in state.items() if key not in ("version", "members")} for state in (wanted, now)
    ]
    if frames[0] != frames[1]:
        return False
    before, after = ({str(member["worker_id"]): member for member in state["members"]} for state in (wanted, now))
    if any(before[name] != after[name] for name in before.keys() & after.keys()):
        return False
    gone, come = (Counter((mine[name]["pool"], mine[name]["role"]) for name in mine.keys() - others.keys())
                  for mine, others in ((before, after), (after, before)))  # fmt: skip
    return gone == come


def state_of(row: Row | None) -> str:
    """Return the state of a worker of the status, in one word."""
    if row is None:
        return "absent"
    if not row.get("is_connected"):
        return "unreachable" if row.get("is_registered") else "gone"
    return str(row.get("state") or ("ready" if row.get("is_registered") else "unregistered"))


def _lacking(member: Row, row: Row | None, ended: str | None) -> str:
    """Return how this worker differs from the desired state; "" if it does not."""
    name, state = member["worker_id"], state_of(row)
    if row is None or state in ("absent", "unreachable", "gone"):
        return f"{name} is {state}"
    if ended is not None and row["incarnation"] == ended:
        return f"{name} has not started anew"
    if row.get("role") != member["role"]:
        return f"{name} is {row.get('role', 'nothing')} and not {member['role']}"
    if member["is_cordoned"]:
        count = int(row.get("in_flight") or 0)
        return f"{name} has {count} requests" if count else "" if state == "drained" else f"{name} is {state}"
    return "" if state == "ready" else f"{name} is {state}"
