"""`clusterctl key create | list | revoke`: the API keys of a cluster, through its admin port."""

from __future__ import annotations

import json
import re
import sys
import time
from typing import Annotated

import typer
from rich.console import Console

from tandem.cluster.program import called
from tandem.clusterctl import page
from tandem.clusterctl.flags import AsJson, Where, on_cluster
from tandem.clusterctl.page import Record, say
from tandem.core.apikeys import Scope
from tandem.core.errors import ConfigError

EXIT_UNKNOWN = 1
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LIFETIME = re.compile(r"([0-9]{1,9})([smhd])")


app = typer.Typer(help="Keys of the API.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def key() -> None:
    """Keys of the API."""


@app.command()
@on_cluster
def create(
    where: Where,
    tenant: Annotated[str, typer.Option(help="Whose requests they are: its share, its budgets, its cached blocks.")],
    scope: Annotated[
        list[Scope] | None, typer.Option(help="What it opens; may be given several times. Without it, infer.")
    ] = None,
    expires: Annotated[str, typer.Option(help="When it ends: never, or in a time such as 30d, 12h, 45m.")] = "never",
    slo: Annotated[str, typer.Option(help="SLO class of its requests; without it they may choose.")] = "",
    priority: Annotated[int, typer.Option(help="The most urgent priority it may ask for; lower is sooner.")] = 0,
    label: Annotated[str, typer.Option(help="What people call it.")] = "",
    as_json: AsJson = False,
) -> None:
    """Create a key and print it, this one time: what is kept cannot be turned back into the key."""
    wish = {
        "tenant": tenant,
        "scopes": [one.value for one in scope or [Scope.INFER]],
        "lifetime_s": lifetime_s(expires),
        "slo": slo,
        "priority": priority,
        "name": label,
    }
    with where.client() as admin:
        made = admin.create_key(wish)
    if as_json:
        print(json.dumps(made, indent=2))
        return
    print(made["key"])
    print(f"This is {made['id']} of {made['tenant']}; it is not shown again.", file=sys.stderr)


@app.command("list")
@on_cluster
def show(where: Where, as_json: AsJson = False) -> None:
    """List keys, by the part of them that may be shown."""
    with where.client() as admin:
        page.show(admin.keys(), _show, as_json=as_json)


@app.command()
@on_cluster
def revoke(
    where: Where,
    key_id: Annotated[str, typer.Argument(help="Such as tdk-0123456789ab.", metavar="KEY")],
) -> None:
    """Revoke a key; every router lets it in no more within moments. Ends with 1 if there is no such key."""
    with where.client() as admin:
        done = admin.revoke_key(key_id)
    if not done["is_revoked"]:
        print(f"clusterctl: there is no key {done['id']}.", file=sys.stderr)
        raise typer.Exit(EXIT_UNKNOWN)
    print(f"revoked {done['id']}")


def lifetime_s(text: str) -> int:
    """Seconds of `never` (0), `30d`, `12h`, `45m`, `90s`; ConfigError if it is none of them."""
    if text == "never":
        return 0
    match = _LIFETIME.fullmatch(text)
    if match is None or not int(match[1]):
        raise ConfigError(f"--expires is {text!r}", todo="Write never, or a time such as 30d, 12h or 45m")
    return int(match[1]) * _UNITS_S[match[2]]


def _show(found: Record, console: Console) -> None:
    if not found["keys"]:
        say(console, f"no key yet; create one with `{called()} key create --tenant NAME`")
        return
    columns = ("KEY", "TENANT", "SCOPES", "CREATED", "EXPIRES", "SLO", "PRIORITY")
    table = page.table(*columns, "LABEL", fixed=columns)
    for one in found["keys"]:
        expires = _day(one["expires_s"]) if one["expires_s"] else "never"
        table.add_row(
            one["id"],
            one["tenant"],
            ", ".join(one["scopes"]),
            _day(one["created_s"]),
            f"{expires} (over)" if one["is_expired"] else expires,
            one["slo"] or "–",
            str(one["priority"]),
            one["name"] or "–",
        )
    console.print(table)


def _day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
