"""`clusterctl slo list | set`: the SLO classes of a cluster, through its admin port."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated

import typer
from rich.console import Console

from tandem.clusterctl.commands import command_app, examples
from tandem.clusterctl.confirm import Consent, EffectKind
from tandem.clusterctl.flags import Where, flagged
from tandem.clusterctl.output import Output, Record
from tandem.clusterctl.rich_output import say
from tandem.core.config import SLO_NAME
from tandem.core.errors import ConfigError

app = command_app(help="Show and change SLO classes.")


@app.command("list", epilog=examples("slo list", "slo list -o yaml"))
@flagged
def list_classes(where: Where, output: Output) -> None:
    """Show the SLO classes in force."""
    with where.client() as admin:
        output.show("SloClasses", admin.slo(), _show)


@app.command("set", epilog=examples("slo set chat --ttft 0.8 --itl 0.05", "slo set chat --ttft 0.8 --dry-run"))
@flagged
def set_class(
    where: Where,
    consent: Consent,
    output: Output,
    wanted: Annotated[str, typer.Argument(metavar="CLASS", help="Name of the class; a new one is added.")],
    ttft: Annotated[float | None, typer.Option(help="Seconds to the first token; 0 = not promised.")] = None,
    itl: Annotated[float | None, typer.Option(help="Seconds between two tokens; 0 = not promised.")] = None,
) -> None:
    """Change what a class promises while requests run; what is not given stays. After a restart the configured classes
    are back."""
    _check(wanted, {"--ttft": ttft, "--itl": itl})
    given = {key: seconds for key, seconds in (("ttft_s", ttft), ("itl_s", itl)) if seconds is not None}
    with where.client() as admin:
        found = admin.slo()
        before = next((row for row in found["classes"] if row["slo"] == wanted), None)
        after = {"slo": wanted, "ttft_s": 0.0, "itl_s": 0.0, **(before or {}), **given}
        deeds = _deeds(before, after)
        if not consent.agreed(deeds, output):
            return
        if deeds:
            found = admin.set_slo(after)
    output.show("SloClasses", found, _show)


def _check(name: str, promises: Mapping[str, float | None]) -> None:
    """Raise ConfigError for values that no router would take, before a request is sent."""
    if not re.fullmatch(SLO_NAME, name):
        todo = "Use 1 to 64 letters, digits, dots, dashes or underscores"
        raise ConfigError(f"{name[:80]!r} cannot be the name of a class", todo=todo)
    for flag, seconds in promises.items():
        if seconds is not None and not 0 <= seconds < math.inf:
            raise ConfigError(f"{flag} is {seconds:g}", todo="Use 0 (nothing is promised) or more seconds")


def _deeds(before: Record | None, after: Record) -> list[EffectKind]:
    """Return the changes; none if the class promises this already."""
    if before == after:
        return []
    if before is None:
        return [EffectKind(deed="create", subject=f"class {after['slo']}", detail=_promises(after))]
    return [EffectKind(deed="set", subject=f"class {after['slo']}", detail=f"{_promises(before)} → {_promises(after)}")]


def _promises(row: Record) -> str:
    """Format promises, such as "TTFT 0.8 s, ITL 0.05 s"."""
    promises = [f"{label} {row[key]:g} s" for key, label in (("ttft_s", "TTFT"), ("itl_s", "ITL")) if row[key]]
    return ", ".join(promises) or "nothing promised"


def _show(found: Record, console: Console) -> None:
    for row in found["classes"]:
        is_default = " (of requests that name none)" if row["slo"] == found["default_slo"] else ""
        say(console, f"{row['slo']}{is_default}: {_promises(row)}")
    if not found["classes"]:
        say(console, "there are no SLO classes")
