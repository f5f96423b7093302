"""`clusterctl key create | list | revoke`: the API keys of a cluster, through its admin port."""

from __future__ import annotations

import dataclasses
import time
from typing import Annotated

import typer
from rich.console import Console

from tandem.clusterctl import rich_output
from tandem.clusterctl.commands import command_app, examples
from tandem.clusterctl.confirm import Consent, EffectKind, show_done
from tandem.clusterctl.flags import Where, duration_s, flagged
from tandem.clusterctl.output import Output, Record, note
from tandem.clusterctl.rich_output import say
from tandem.controlplane.prog_name import called
from tandem.core.api_keys import KeyWish, Scope, shown_id
from tandem.core.errors import ConfigError, NotFoundError

app = command_app(help="Create, list and revoke API keys.")


@app.command(
    epilog=examples("key create --tenant acme --expires 90d --label billing", "key create --tenant acme --dry-run")
)
@flagged
def create(
    where: Where,
    consent: Consent,
    output: Output,
    tenant: Annotated[str, typer.Option(help="Tenant of its requests, with its share, budgets and cached blocks.")],
    scope: Annotated[
        list[Scope] | None, typer.Option(help="Scope of the key; may be given several times. Without it, infer.")
    ] = None,
    expires: Annotated[str, typer.Option(help="Expiry: never, or in a time such as 30d, 12h, 45m.")] = "never",
    slo: Annotated[str, typer.Option(help="SLO class of its requests; without it, requests choose.")] = "",
    priority: Annotated[int, typer.Option(help="Most urgent priority of its requests; lower is more urgent.")] = 0,
    label: Annotated[str, typer.Option(help="Label of the key.")] = "",
) -> None:
    """Create a key and print it, this one time: what is kept cannot be turned back into the key. Asks only where it is
    the first one, and requests without a key are refused from then on. Each call is one key."""
    wish = KeyWish(
        tenant=tenant,
        scopes=scope or [Scope.INFER],
        lifetime_s=lifetime_s(expires),
        slo=slo,
        priority=priority,
        name=label,
    )
    wish.validate()
    with where.client() as admin:
        found = admin.keys()
        deeds = _created(wish, found)
        if consent.dry_run:
            _check_class(wish, admin.slo())
        if (consent.dry_run or _lets_strangers_in(found)) and not consent.agreed(deeds, output):
            return
        made = admin.create_key({**dataclasses.asdict(wish), "scopes": [one.value for one in wish.scopes]})
    output.show("ApiKey", made, lambda made, console: say(console, made["key"]))
    note(f"This is {made['id']} of {made['tenant']}; it is not shown again.")


@app.command("list", epilog=examples("key list", "key list -o json"))
@flagged
def show(where: Where, output: Output) -> None:
    """List keys, by the part of them that may be shown."""
    with where.client() as admin:
        output.show("ApiKeys", admin.keys(), _show)


@app.command(epilog=examples("key revoke tdk-0123456789ab", "key revoke tdk-0123456789ab --yes -o json"))
@flagged
def revoke(
    where: Where,
    consent: Consent,
    output: Output,
    key_id: Annotated[str, typer.Argument(help="Such as tdk-0123456789ab.", metavar="KEY")],
) -> None:
    """Revoke a key; every router lets it in no more within moments. Ends with 3 if there was no such key, with 0 if it
    is revoked already."""
    name = shown_id(key_id)
    with where.client() as admin:
        deeds = _revoked(name, admin.keys())
        if not consent.agreed(deeds, output, _already(name)):
            return
        if deeds and not admin.revoke_key(name)["is_revoked"]:  # the store has lost it since
            raise _unknown(name)
    show_done(deeds, output, f"revoked {name}" if deeds else _already(name))


def _created(wish: KeyWish, found: Record) -> list[EffectKind]:
    what = [f"tenant {wish.tenant}", *(one.value for one in wish.scopes), *([wish.name] if wish.name else [])]
    deeds = [EffectKind(deed="create", subject="a key", detail=", ".join(what))]
    if _lets_strangers_in(found):
        why = "refused from now on: it is the first key"
        deeds.append(EffectKind(deed="set", subject="requests without a key", detail=why))
    return deeds


def _lets_strangers_in(found: Record) -> bool:
    """True if requests without a key are answered until there is one."""
    return found.get("anonymous") == "loopback" and bool(found.get("is_open"))


def _check_class(wish: KeyWish, found: Record) -> None:
    known = [row["slo"] for row in found["classes"]]
    if wish.slo and wish.slo not in known:
        why = f"there are: {', '.join(known) or 'none'}"
        raise ConfigError(f"the SLO class {wish.slo[:80]!r} does not exist", why=why, todo="add it with `slo set`")


def _revoked(name: str, found: Record) -> list[EffectKind]:
    """Return the change, none if it is revoked already; NotFoundError if it never was there."""
    row = next((row for row in found["keys"] if row["id"] == name), None)
    if row is not None:
        detail = ", ".join([f"tenant {row['tenant']}", *row["scopes"], *([row["name"]] if row["name"] else [])])
        return [EffectKind(deed="revoke", subject=name, detail=detail)]
    if name in found.get("revoked", ()):
        return []
    raise _unknown(name)


def _unknown(name: str) -> NotFoundError:
    return NotFoundError(f"there is no key {name}", todo=f"`{called()} key list` shows those there are")


def _already(name: str) -> str:
    return f"{name} is revoked already"


def lifetime_s(text: str) -> int:
    """Return seconds of `never` (0), `30d`, `12h`, `45m`, `90s`; ConfigError if it is none of them."""
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
    table = rich_output.table(*columns, "LABEL", fixed=columns)
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
