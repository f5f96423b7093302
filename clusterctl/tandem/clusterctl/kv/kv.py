"""`clusterctl kv audit`: every held KV block, its holder, and whether the hold is explained.

Exit codes: 0 everything is explained; 7 blocks are held that nothing explains (with --repair: and were not released);
1 a worker could not be asked, so the result is unknown; 3 no worker reported: the router knows none yet.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.clusterctl.commands import command_app, examples
from tandem.clusterctl.confirm import Consent
from tandem.clusterctl.exit_codes import Exit
from tandem.clusterctl.flags import Where, flagged
from tandem.clusterctl.kv import audit_view
from tandem.clusterctl.kv.audit import Findings, find_unexplained
from tandem.clusterctl.output import Output

if TYPE_CHECKING:
    from tandem.clusterctl.admin_client import AdminClient

WAIT_S = 3.0
"""A lease and a margin: messages in transit at the first snapshot have arrived, or were fenced, by the second."""

app = command_app(help="Look after KV blocks.")


@app.command(epilog=examples("kv audit", "kv audit --repair --dry-run", "kv audit --repair --yes", "kv audit -o json"))
@flagged
def audit(
    where: Where,
    consent: Consent,
    output: Output,
    repair: Annotated[
        bool, typer.Option(help="Release what nothing explains, where it is provably fenced; says what was released.")
    ] = False,
    wait: Annotated[
        float, typer.Option(help="Seconds between the two looks at what nothing explains; a lease is 2.5.")
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
            consent.ask(audit_view.release_lines(findings.fenced))
            findings = repaired(admin, findings)
    output.show("KvAudit", findings.as_json(), lambda found, console: audit_view.show(findings, console))
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
