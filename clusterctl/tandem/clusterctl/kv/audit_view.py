"""An audit as text: totals of every worker, then the unexplained holds, block by block. All of it is in `--json`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from tandem.clusterctl import rich_output
from tandem.clusterctl.kv.audit import Findings
from tandem.clusterctl.output import Record
from tandem.clusterctl.rich_output import say
from tandem.controlplane.prog_name import called


def show(findings: Findings, console: Console) -> None:
    look = findings.look
    if look["workers"]:
        console.print(_totals(look["workers"]))
    for missing in look["unanswered"]:
        say(console, f"not asked: {missing['worker']}: {missing['why']}")
    for worker in look["workers"]:
        index = worker.get("index", {"is_equal": True})
        if not index["is_equal"]:
            counts = f"holds {index['held_blocks']} cached blocks, the router knows of {index['known_blocks']}"
            say(console, f"index: {worker['worker']} {counts} (it catches up within a lease)")
    unknown = [hold for hold in look["holds"] if hold["verdict"] == "unknown"]
    for hold in unknown:
        say(console, f"not known: {_hold(hold)}: {hold['why']}")
    for hold in findings.unexplained:
        say(console, f"unexplained: {_hold(hold)}: {hold['why']}{_fence(hold)}")
    for line in release_lines(findings.would_release):
        say(console, line)
    if findings.would_release:
        say(console, "nothing was changed (--dry-run)")
    for hold in findings.released:
        say(console, f"released: {_name(hold)}, blocks {ranges(hold['blocks'])}")
    for hold in findings.refused:
        say(console, f"not released: {_name(hold)}: {hold['why']}")
    say(console, _verdict(findings))


def release_lines(holds: Iterable[Record]) -> list[str]:
    """Return the holds that --repair asks to release, one a line."""
    return [f"- {_name(hold)}: release blocks {ranges(hold['blocks'])}" for hold in holds]


def ranges(blocks: Iterable[int]) -> str:
    """Format sorted block ids as "3–7, 9"."""
    runs: list[list[int]] = []
    for block in sorted(blocks):
        if runs and block == runs[-1][-1] + 1:
            runs[-1][1:] = [block]
        else:
            runs.append([block])
    return ", ".join("–".join(map(str, run)) for run in runs)


def _totals(workers: Sequence[Record]) -> Table:
    names, counts = ("WORKER", "ROLE", "GROUP"), ("BLOCKS", "FREE", "CACHED", "REQUEST", "PUSHING", "RESERVED")
    table = rich_output.table(*names, *counts, right=counts, fixed=names)
    for worker in workers:
        for group in worker["groups"]:
            held = [str(group[key]) for key in ("total", "free", "cached", "request", "pushing", "reserved")]
            table.add_row(worker["worker"], worker["role"], str(group["group"]), *held)
    return table


def _name(hold: Record) -> str:
    return f"{hold['worker']} group {hold['group']} {hold['kind']} {hold['key']}"


def _hold(hold: Record) -> str:
    blocks = hold.get("unchanged_blocks", hold["blocks"])
    text = f"{_name(hold)}, blocks {ranges(blocks)}, for {hold['age_s']:.1f} s"
    return f"{text}, peer {hold['peer']} ({hold['peer_incarnation']})" if hold["peer"] else text


def _fence(hold: Record) -> str:
    return " (fenced: --repair can release it)" if hold["is_fenced"] else " (not provably fenced)"


def _verdict(findings: Findings) -> str:
    held = sum(len(hold["blocks"]) for hold in findings.look["holds"])
    left = sum(len(hold["unchanged_blocks"]) for hold in findings.left)
    if left:
        return f"{left} blocks are held and nothing explains it"
    if findings.look["unanswered"]:
        return "not everybody could be asked"
    if not findings.look["workers"]:
        return f"nobody reported: no worker is connected to the router. `{called()} status` shows what it waits for"
    return f"all {held} holds of blocks are explained"
