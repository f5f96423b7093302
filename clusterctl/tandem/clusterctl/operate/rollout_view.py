"""Progress of rollouts, from the desired state and the status; waiting for their end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tandem.clusterctl.flags import check_positive
from tandem.clusterctl.inspect.get import workers_of
from tandem.clusterctl.operate.wait import wait_until
from tandem.clusterctl.output import Record
from tandem.core.errors import ConflictError, NotFoundError, StartupError

if TYPE_CHECKING:
    from rich.console import Console

    from tandem.clusterctl.admin_client import AdminClient


def look(admin: AdminClient, model: str = "") -> dict[str, Any]:
    """Return a row for each model, or for this one alone. Raises NotFoundError for an unknown model."""
    wanted, status = admin.desired()["desired"], admin.status()
    models = list(dict.fromkeys(pool["model"] for pool in wanted["pools"]))
    if model and model not in models:
        raise NotFoundError(f"there is no model {model[:80]!r}", todo=f"there are {', '.join(models)}")
    rows = [row_of(one, wanted, status) for one in models if model in ("", one)]
    return {"version": wanted["version"], "items": rows}


def row_of(model: str, wanted: Record, status: Record) -> dict[str, Any]:
    """Return a model's row: its last rollout, and the number of workers of each revision."""
    pools = [pool for pool in wanted["pools"] if pool["model"] == model]
    now = pools[0]["revision"]
    rollout = next((one for one in wanted["rollouts"] if one["model"] == model), None) or {
        "model": model, "revision": now, "previous": "", "phase": "none", "reason": "", "is_undo": False,
        "max_surge": 0, "max_unavailable": 0, "sizes": {},
    }  # fmt: skip
    specs = {one["name"]: one for one in wanted["revisions"] if one["model"] == model}
    spec = specs.get(rollout["revision"], {"model_path": "", "settings": {}})
    seen = {row["worker"]: row for row in status["workers"]}
    known = {member["worker_id"]: member for member in wanted["members"]}
    counts = []
    for pool in pools:
        rows = [row for row in workers_of(wanted, status) if row["role"] == pool["role"] or row["pool"] == pool["name"]]
        mine = [row for row in rows if seen.get(row["worker"], {}).get("model", model) == model]
        new = [row for row in mine if _revision(row, seen, known, now) == rollout["revision"]]
        size = rollout["sizes"].get(pool["name"], pool["count"])
        ready = sum(row["state"] == "ready" and row["is_wanted"] for row in new)
        if size or mine:
            counts.append({"pool": pool["name"], "wanted": size, "new": len(new), "ready": ready,
                           "old": len(mine) - len(new)})  # fmt: skip
    kept = {name: value for name, value in rollout.items() if name != "sizes"}
    return {**kept, "model_path": spec["model_path"], "settings": dict(spec["settings"]), "pools": counts}


def wait(admin: AdminClient, model: str, timeout_s: float, written: Sequence[Record] | None = None) -> None:
    """Wait until no rollout of `model` ("" = any) is in progress. DeadlineError after `timeout_s`.

    `written`: the rollouts to finish. Another one in place of one of them, or a pause, raises
    ConflictError; one that stops by itself raises StartupError.
    """
    check_positive("--timeout", timeout_s, "seconds")

    def unfinished() -> list[str]:
        rows = look(admin, model)["items"]
        if written is not None:
            _check_going(rows, {one["model"]: one["revision"] for one in written})
        going = [row for row in rows if row["phase"] == "rolling"]
        if not rows:
            return ["no model is listed"]
        return ["; ".join(map(in_a_line, going))] if going else []

    wait_until(unfinished, timeout_s, "the rollout is not over")


def _check_going(rows: Sequence[Record], meant: Mapping[str, str]) -> None:
    for row in rows:
        if row["model"] in meant and row["revision"] != meant[row["model"]]:
            why = f"{row['model']} was to become {meant[row['model']]}, and becomes {row['revision']}"
            todo = "look at `clusterctl events`"
            raise ConflictError("another writer changed the rollout meanwhile", why=why, todo=todo)
        if row["phase"] == "failed":
            todo = "go back with `clusterctl rollout undo`, or mend it and `clusterctl rollout resume`"
            what = f"the rollout of {row['model']} to {row['revision']} stopped"
            raise StartupError(what, why=row["reason"], todo=todo)
        if row["phase"] == "paused":
            raise paused(row)


def paused(row: Record) -> ConflictError:
    """Return the error of a wait for a rollout that is paused."""
    todo = "let it go on with `clusterctl rollout resume`"
    return ConflictError(f"the rollout of {row['model']} to {row['revision']} is paused", todo=todo)


def in_a_line(row: Record) -> str:
    """Format a row, such as "tiny to r12ab: prefill 1 of 2, decode 0 of 2"."""
    parts = [f"{pool['pool']} {pool['ready']} of {pool['wanted']}" for pool in row["pools"] if pool["wanted"]]
    return f"{row['model']} to {row['revision']}: {', '.join(parts)}"


def lines_of(before: Record, after: Record) -> list[str]:
    """Return the changes of rollouts, one a line: part of the difference shown before consent."""
    were = {one["model"]: one for one in before.get("rollouts", ())}
    lines = []
    for one in after.get("rollouts", ()):
        if were.get(one["model"]) != one:
            how = f"at most {one['max_surge']} more of a role, at most {one['max_unavailable']} fewer that serve"
            what = f"{one['previous']} → {one['revision']}" + (" (undo)" if one["is_undo"] else "")
            lines.append(f"~ {one['model']}: rollout {what}, {one['phase']}; {how}")
            lines += _spec_lines(one, after)
    return lines


def _spec_lines(rollout: Record, after: Record) -> list[str]:
    for spec in after.get("revisions", ()):
        if (spec["model"], spec["name"]) == (rollout["model"], rollout["revision"]):
            parts = [f"{key} = {value}" for key, value in spec["settings"].items()]
            parts = [f"files in {spec['model_path']}", *parts] if spec["model_path"] else parts
            return [f"  {part}" for part in parts]
    return []


def _revision(row: Record, seen: Mapping[str, Record], known: Mapping[str, Record], now: str) -> str:
    """Return the revision that the worker reports, or its desired one."""
    said = seen.get(row["worker"], {}).get("revision")
    return str(said or known.get(row["worker"], {}).get("revision") or now)


def show(found: Record, console: Console) -> None:
    from tandem.clusterctl import rich_output

    columns = ("MODEL", "REVISION", "BEFORE", "PHASE")
    table = rich_output.table(*columns, "NEW THAT SERVE", "OLD", fixed=columns)
    for row in found["items"]:
        parts = [f"{pool['pool']} {pool['ready']}/{pool['wanted']}" for pool in row["pools"]]
        old = ", ".join(f"{pool['pool']} {pool['old']}" for pool in row["pools"] if pool["old"])
        phase = f"{row['phase']} (undo)" if row["is_undo"] else row["phase"]
        table.add_row(row["model"], row["revision"], row["previous"] or "–", phase, ", ".join(parts), old or "–")
    console.print(table)
    for row in found["items"]:
        if row["reason"]:
            rich_output.say(console, f"{row['model']} stopped: {row['reason']}")


def show_wide(found: Record, console: Console) -> None:
    """Print the same, and the content of the revisions."""
    from tandem.clusterctl import rich_output

    show(found, console)
    for row in found["items"]:
        parts = [f"{key} = {value}" for key, value in row["settings"].items()]
        parts = [f"files in {row['model_path']}", *parts] if row["model_path"] else parts
        rich_output.say(console, f"{row['revision']}: {', '.join(parts) or 'as configured'}")
