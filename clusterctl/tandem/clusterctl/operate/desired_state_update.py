"""Steps of every command that changes the desired state: propose, show the difference, ask, write, wait."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tandem.clusterctl.confirm import Consent
from tandem.clusterctl.flags import check_positive
from tandem.clusterctl.operate.rollout_view import lines_of as rollout_lines
from tandem.clusterctl.operate.wait import is_same_wish, restarting, unsettled, wait_until
from tandem.clusterctl.output import Output, Record
from tandem.clusterctl.unscheduled import EVENTS, Unplaced
from tandem.core.errors import ConflictError

if TYPE_CHECKING:
    from rich.console import Console

    from tandem.clusterctl.admin_client import AdminClient

_LOOK_AT_EVENTS_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyOptions(Consent):
    """Flags of every command that changes the desired state."""

    wait: Annotated[bool, typer.Option(help="Wait until the cluster is as desired.")] = True
    timeout: Annotated[float, typer.Option(help="Seconds to wait; then it ends with 6 and the change goes on.")] = 600.0


def carry_out(
    admin: AdminClient,
    wish: Mapping[str, Any],
    manner: ApplyOptions,
    output: Output,
    current: Mapping[str, int] | None = None,
) -> None:
    """Apply `wish`; `current` gives the preconditions. Prints the changes.
    Raises ConflictError when another writer was faster, DeadlineError when it takes longer than `--timeout`."""
    check_positive("--timeout", manner.timeout, "seconds")
    found = admin.propose({"wish": dict(wish), "current": dict(current or {})})
    if not manner.dry_run:
        lives = {row["worker"]: row["incarnation"] for row in admin.status()["workers"]}
        if found["is_changed"]:
            manner.ask(lines_of(found))
            admin.write_desired(found["after"])
        if manner.wait:
            _wait(admin, found, lives, manner.timeout)
    show_change(found, manner, output)


def propose_until_written(admin: AdminClient, wish: Mapping[str, Any], manner: ApplyOptions) -> Record:
    """Propose, ask and write until it succeeds. The steps of a rollout change the record in between: the change agreed
    to is proposed again as long as it has the same effect."""
    agreed: list[str] | None = None
    while True:
        found = admin.propose({"wish": dict(wish)})
        if manner.dry_run or not found["is_changed"]:
            return found
        if agreed is None:
            manner.ask(lines_of(found))
            agreed = lines_of(found)
        try:
            admin.write_desired(found["after"])
            return found
        except ConflictError:
            if lines_of(admin.propose({"wish": dict(wish)})) != agreed:
                raise


def show_change(found: Record, manner: ApplyOptions, output: Output) -> None:
    """Show the changes made, or those that would be made."""
    output.show("Change", {"is_dry_run": manner.dry_run, **found}, _view)


def lines_of(found: Record) -> list[str]:
    """Return the difference, one worker a line."""
    signs = {"start": "+", "stop": "-"}
    rows = [
        f"{signs.get(row['deed'], '~')} {row['worker_id']}: {row['deed']}"
        + (f" ({row['detail']})" if row["detail"] else "")
        for row in found["changes"]
    ]
    rows += rollout_lines(found["before"], found["after"])
    counts = [_counts(found[side]) for side in ("before", "after")]
    return [*rows, f"  {counts[0]} → {counts[1]}"] if counts[0] != counts[1] else rows


def _wait(admin: AdminClient, found: Record, lives: Mapping[str, str], timeout_s: float) -> None:
    wanted, anew = found["after"], restarting(found["changes"], lives)
    places = _Places(admin, timeout_s)

    def look() -> list[str]:
        nonlocal wanted
        now, workers = admin.desired()["desired"], admin.status()["workers"]
        if now["version"] != wanted["version"]:
            if not is_same_wish(wanted, now):
                why = f"version {wanted['version']} was written here, and there is version {now['version']}"
                todo = "look at `clusterctl events`"
                raise ConflictError("another writer changed the desired state meanwhile", why=why, todo=todo)
            wanted = now
        return places.said_of(unsettled(wanted, workers, anew))

    wait_until(look, timeout_s, "the cluster is not as desired")


class _Places:
    """Reports why absent workers have no place, if that is the cause; reads the events now and then."""

    def __init__(self, admin: AdminClient, timeout_s: float) -> None:
        self._admin, self._timeout_s, self._unplaced = admin, timeout_s, Unplaced()
        self._next, self._look_at_s = "", 0.0

    def said_of(self, missing: list[str]) -> list[str]:
        absent = {line.removesuffix(" is absent") for line in missing if line.endswith(" is absent")}
        if absent and time.monotonic() >= self._look_at_s:
            found = self._admin.events(after=self._next, count=EVENTS)
            self._unplaced.hear(found["events"])
            self._next, self._look_at_s = found["next"], time.monotonic() + _LOOK_AT_EVENTS_S
        waits = {f"{name} is absent": self._unplaced.why(name) for name in absent}
        return [
            f"{line.split()[0]} {waits[line]}; room is waited for up to {self._timeout_s:g} s here (--timeout)"
            if waits.get(line) else line
            for line in missing
        ]  # fmt: skip


def _view(found: Record, console: Console) -> None:
    from tandem.clusterctl.rich_output import say

    for line in lines_of(found):
        say(console, line)
    if not found["is_changed"]:
        say(console, "nothing to change")
    elif found["is_dry_run"]:
        say(console, "nothing was changed (--dry-run)")


def _counts(state: Record) -> str:
    """Such as "prefill 2, decode 4"."""
    return ", ".join(f"{pool['name']} {pool['count']}" for pool in state["pools"] if pool["count"])
