"""`clusterctl plan --live`: the observations, target split and pending decisions of a running cluster's planner."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tandem.clusterctl.flags import Where
from tandem.clusterctl.output import Output, Record
from tandem.core.link_speed import rate

if TYPE_CHECKING:
    from rich.console import Console

_SILENT = {
    "off": 'the planner is off; `[planner] mode = "advise"` has it say what it would do',
    "advise": "the planner has not reported lately; the log of `clusterctl up` has the reason",
}
_UNMEASURED = "not measured: moving KV is taken to need no time"


def show(where: Where, output: Output) -> None:
    """Print its last report; UnavailableError or ConfigError when the cluster cannot be found."""
    with where.client() as admin:
        output.show("LivePlan", admin.planned(), _show)


def next_action(plan: Record) -> str:
    """Return when it would change something next, in words."""
    if plan["unsettled"]:
        return f"not while {plan['unsettled']}"
    if plan["wanted"] == plan["split"]:
        wait = f", and nothing for {plan['waits_s']:.0f} s, as something changed lately" if plan["waits_s"] else ""
        return f"none is wanted{wait}"
    if plan["waits_s"]:
        return f"in {plan['waits_s']:.0f} s at the earliest, as something changed lately"
    if not plan["is_due"]:
        return "once it has wanted the same for long enough"
    return "never, it only advises" if plan["is_advice"] else "now"


def _show(found: Record, console: Console) -> None:
    from tandem.clusterctl import rich_output

    plan = found["plan"]
    if plan is None:
        rich_output.say(console, _SILENT.get(found["mode"], _SILENT["advise"]))
        return
    age_s = max(0.0, time.time() - plan["at_s"])
    lines = {
        "mode": plan["mode"],
        "split": f"{plan['split']}, version {plan['version']} of the desired state",
        "wanted": plan["wanted"],
        "because": plan["reason"],
        "next action": next_action(plan),
        "seen": f"{plan['requests']} requests, {plan['routers']} routers, {age_s:.0f} s ago",
        "links": rate(plan["link_bytes_per_s"]) if plan["link_bytes_per_s"] else _UNMEASURED,
        "last advice": _deed(plan["last_advice"]),
        "last action": _deed(plan["last_action"]),
        "last denial": _deed(plan["last_denial"]),
    }
    for name, value in lines.items():
        rich_output.say(console, f"{name:<15} {value}")
    rows = {one["split"]: one for one in (plan["now"], plan["then"]) if one is not None}
    if rows:
        columns = ("SPLIT", "KEPT", "GOODPUT/S", "TTFT P90", "ITL P90", "PREFILL BUSY")
        table = rich_output.table(*columns, right=columns[1:], fixed=columns[:1])
        for one in rows.values():
            table.add_row(
                one["split"], f"{one['attained']:.1%}", f"{one['goodput_per_s']:.2f}", f"{one['ttft_p90_s']:.2f} s",
                f"{1000 * one['itl_p90_s']:.0f} ms", f"{one['prefill_busy']:.0%}",
            )  # fmt: skip
        console.print(table)


def _deed(deed: Record | None) -> str:
    if deed is None:
        return "–"
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(deed['at_s']))} {deed['what']}"
