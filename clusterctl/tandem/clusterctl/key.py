"""`clusterctl key create | list | revoke`: the API keys of a cluster, through its admin port."""

from __future__ import annotations

import json
import re
import sys
import time
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tandem.cluster.program import called
from tandem.clusterctl.admin_client import AdminClient
from tandem.clusterctl.flags import AsJson, Endpoint, KeyFile, Name, StateDirFlag
from tandem.core.apikeys import Scope
from tandem.core.config import DEFAULT_CLUSTER
from tandem.core.errors import ConfigError

EXIT_UNKNOWN = 1
_FILE_WIDTH = 200
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LIFETIME = re.compile(r"([0-9]{1,9})([smhd])")


app = typer.Typer(help="Keys of the API.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def key() -> None:
    """Keys of the API."""


@app.command()
def create(
    tenant: Annotated[str, typer.Option(help="Whose requests they are: its share, its budgets, its cached blocks.")],
    scope: Annotated[
        list[Scope] | None, typer.Option(help="What it opens; may be given several times. Without it, infer.")
    ] = None,
    expires: Annotated[str, typer.Option(help="When it ends: never, or in a time such as 30d, 12h, 45m.")] = "never",
    slo: Annotated[str, typer.Option(help="SLO class of its requests; without it they may choose.")] = "",
    priority: Annotated[int, typer.Option(help="The most urgent priority it may ask for; lower is sooner.")] = 0,
    label: Annotated[str, typer.Option(help="What people call it.")] = "",
    name: Name = DEFAULT_CLUSTER,
    state_dir: StateDirFlag = "",
    endpoint: Endpoint = "",
    admin_key_file: KeyFile = "",
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
    with AdminClient.find(endpoint=endpoint, admin_key_file=admin_key_file, name=name, state_dir=state_dir) as admin:
        made = admin.create_key(wish)
    if as_json:
        print(json.dumps(made, indent=2))
        return
    print(made["key"])
    print(f"This is {made['id']} of {made['tenant']}; it is not shown again.", file=sys.stderr)


@app.command("list")
def show(
    name: Name = DEFAULT_CLUSTER,
    state_dir: StateDirFlag = "",
    endpoint: Endpoint = "",
    admin_key_file: KeyFile = "",
    as_json: AsJson = False,
) -> None:
    """List keys, by the part of them that may be shown."""
    with AdminClient.find(endpoint=endpoint, admin_key_file=admin_key_file, name=name, state_dir=state_dir) as admin:
        found = admin.keys()
    if as_json:
        print(json.dumps(found, indent=2))
    elif not found["keys"]:
        print(f"no key yet; create one with `{called()} key create --tenant NAME`")
    else:
        Console(width=None if sys.stdout.isatty() else _FILE_WIDTH).print(_table(found["keys"]))


@app.command()
def revoke(
    key_id: Annotated[str, typer.Argument(help="Such as tdk-0123456789ab.", metavar="KEY")],
    name: Name = DEFAULT_CLUSTER,
    state_dir: StateDirFlag = "",
    endpoint: Endpoint = "",
    admin_key_file: KeyFile = "",
) -> None:
    """Revoke a key; every router lets it in no more within moments. Ends with 1 if there is no such key."""
    with AdminClient.find(endpoint=endpoint, admin_key_file=admin_key_file, name=name, state_dir=state_dir) as admin:
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


def _table(keys: list[dict[str, Any]]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("KEY", "TENANT", "SCOPES", "CREATED", "EXPIRES", "SLO", "PRIORITY", "LABEL"):
        table.add_column(column, no_wrap=column != "LABEL")
    for one in keys:
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
    return table


def _day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
