"""`clusterctl kv audit`: every held KV block, its holder, and whether the hold is explained.

Exit codes: 0 everything is explained; 7 blocks are held that nothing explains (with --repair: and were not released);
1 a worker could not be asked, so the result is unknown; 3 no worker reported: the router knows none yet.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tandem.clusterctl import rich_output
from tandem.clusterctl.commands import command_app, examples
from tandem.clusterctl.confirm import Consent
from tandem.clusterctl.exit_codes import Exit
from tandem.clusterctl.flags import Where, flagged
from tandem.clusterctl.output import Output, Record
from tandem.clusterctl.rich_output import say
from tandem.controlplane.prog_name import called

if TYPE_CHECKING:
    from tandem.clusterctl.admin_client import AdminClient

WAIT_S = 3.0
"""A lease and a margin: messages in transit at the first snapshot have arrived, or were fenced, by the second."""

app = command_app(help="Audit held KV blocks.")
_HOLD = itemgetter("worker", "group", "kind", "key")
_HOLDING = itemgetter("worker", "incarnation", "group", "kind", "key", "since_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """`look` is the latest; `unexplained` are its holds that were suspect before too, with the blocks held since."""

    look: Record
    unexplained: Sequence[Record]
    would_release: Sequence[Record] = field(default_factory=tuple)
    released: Sequence[Record] = field(default_factory=tuple)
    refused: Sequence[Record] = field(default_factory=tuple)

    @property
    def fenced(self) -> list[Record]:
        """Return unexplained holds that can be released: no writer can reach them any more."""
        return [hold for hold in self.unexplained if hold["is_fenced"]]

    @property
    def left(self) -> list[Record]:
        """Return unexplained holds that were not released."""
        gone = {_HOLD(record) for record in self.released}
        return [hold for hold in self.unexplained if _HOLD(hold) not in gone]

    def as_json(self) -> dict[str, Any]:
        names = ("unexplained", "would_release", "released", "refused")
        return {**self.look, **{name: list(getattr(self, name)) for name in names}}


@app.command(epilog=examples("kv audit", "kv audit --repair --dry-run", "kv audit --repair --yes", "kv audit -o json"))
@flagged
def audit(
    where: Where,
    consent: Consent,
    output: Output,
    repair: Annotated[
        bool, typer.Option(help="Release unexplained holds that are provably fenced, and print them.")
    ] = False,
    wait: Annotated[
        float, typer.Option(help="Seconds between the two snapshots of unexplained holds; a lease is 2.5.")
    ] = WAIT_S,
) -> None:
    """Lay the workers' ledgers against each other. Ends with 7 if blocks are held that nothing explains, with 1 if
    a worker could not be asked, with 3 if there was none to ask, else with 0."""
    if not wait >= 0:
        raise typer.BadParameter(f"{wait:g} is less than 0", param_hint="--wait")
    if repair and not consent.dry_run:
        consent.check()  # before the audit: it is not known yet whether there will be anything to ask
    with where.client() as admin:
        findings = run(admin, wait)
        if repair and consent.dry_run:
            findings = dataclasses.replace(findings, would_release=findings.fenced)
        elif repair and findings.fenced:
            consent.ask(release_lines(findings.fenced))
            findings = repaired(admin, findings)
    output.show("KvAudit", findings.as_json(), lambda found, console: show(findings, console))
    raise typer.Exit(exit_code(findings))


def run(admin: AdminClient, wait_s: float, *, sleep: Callable[[float], None] = time.sleep) -> Findings:
    """Take a snapshot, and a second one `wait_s` later if the first leaves questions."""
    first = admin.audit()
    second = None
    if any(hold.get("verdict") == "suspect" for hold in first["holds"]):
        sleep(wait_s)
        second = admin.audit()
    return Findings(look=second or first, unexplained=find_unexplained(first, second))


def repaired(admin: AdminClient, findings: Findings) -> Findings:
    """Release the fenced holds, as far as workers agree, and return the findings after that."""
    answer = admin.repair(findings.fenced)
    return dataclasses.replace(findings, released=answer["released"], refused=answer["refused"])


def exit_code(findings: Findings) -> int:
    """Return the exit code (see the module's docstring); a certain error comes before an unknown result."""
    if findings.left:
        return Exit.UNHEALTHY
    if findings.look["unanswered"]:
        return Exit.FAILED
    return Exit.OK if findings.look["workers"] else Exit.NOT_FOUND


def find_unexplained(first: Record, second: Record | None) -> list[Record]:
    """Return holds that are suspect in both snapshots: the same holder in the same incarnation, holding since the same
    moment. Only blocks held both times count, so blocks in transit are excluded."""
    if second is None:
        return []
    before = {_HOLDING(hold): frozenset(hold["blocks"]) for hold in first["holds"] if hold["verdict"] == "suspect"}
    found: list[Record] = []
    for hold in second["holds"]:
        kept = before.get(_HOLDING(hold), frozenset()) & frozenset(hold["blocks"])
        if hold["verdict"] == "suspect" and kept:
            found.append({**hold, "unchanged_blocks": sorted(kept)})
    return found


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
        return "not every worker could be asked"
    if not findings.look["workers"]:
        return f"no worker reported: none is connected to the router. `{called()} status` shows what it waits for"
    return f"all {held} holds of blocks are explained"
