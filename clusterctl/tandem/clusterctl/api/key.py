"""`clusterctl key create | list | revoke`: the API keys of a cluster, through its admin port."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.console import Console

from tandem.cluster.program import called
from tandem.clusterctl import page
from tandem.clusterctl.commands import command_app, examples
from tandem.clusterctl.durations import duration_s
from tandem.clusterctl.flags import Where, flagged
from tandem.clusterctl.output import Output, Record, note
from tandem.clusterctl.page import say
from tandem.core.apikeys import Scope
from tandem.core.errors import ConfigError, NotFoundError

app = command_app(help="Keys of the API.")


@app.command(epilog=examples("key create --tenant acme --expires 90d --label billing"))
@flagged
def create(
    where: Where,
    output: Output,
    tenant: Annotated[str, typer.Option(help="Whose requests they are: its share, its budgets, its cached blocks.")],
    scope: Annotated[
        list[Scope] | None, typer.Option(help="What it opens; may be given several times. Without it, infer.")
    ] = None,
    expires: Annotated[str, typer.Option(help="When it ends: never, or in a time such as 30d, 12h, 45m.")] = "never",
    slo: Annotated[str, typer.Option(help="SLO class of its requests; without it they may choose.")] = "",
    priority: Annotated[int, typer.Option(help="The most urgent priority it may ask for; lower is sooner.")] = 0,
    label: Annotated[str, typer.Option(help="What people call it.")] = "",
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
    output.show("ApiKey", made, lambda made, console: say(console, made["key"]))
    note(f"This is {made['id']} of {made['tenant']}; it is not shown again.")


@app.command("list", epilog=examples("key list", "key list -o json"))
@flagged
def show(where: Where, output: Output) -> None:
    """List keys, by the part of them that may be shown."""
    with where.client() as admin:
        output.show("ApiKeys", admin.keys(), _show)


@app.command(epilog=examples("key revoke tdk-0123456789ab"))
@flagged
def revoke(
    where: Where,
    key_id: Annotated[str, typer.Argument(help="Such as tdk-0123456789ab.", metavar="KEY")],
) -> None:
    """Revoke a key; every router lets it in no more within moments. Ends with 3 if there is no such key."""
    with where.client() as admin:
        done = admin.revoke_key(key_id)
    if not done["is_revoked"]:
        raise NotFoundError(f"there is no key {done['id']}", todo=f"`{called()} key list` shows those there are")
    print(f"revoked {done['id']}")


def lifetime_s(text: str) -> int:
    """Seconds of `never` (0), `30d`, `12h`, `45m`, `90s`; ConfigError if it is none of them."""
    if text == "never":
        return 0
    seconds = duration_s(text)
    if not seconds:
        raise ConfigError(f"--expires is {text!r}", todo="Write never, or a time such as 30d, 12h or 45m")
    return seconds


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
