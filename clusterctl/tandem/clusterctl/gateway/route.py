"""`clusterctl route policy | explain`: how requests are routed, by another policy from now on, and why."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tandem.clusterctl import change_summary
from tandem.clusterctl.change_summary import EffectKind
from tandem.clusterctl.commands import command_app, examples
from tandem.clusterctl.confirm import Consent
from tandem.clusterctl.flags import Where, flagged
from tandem.clusterctl.gateway import route_view
from tandem.clusterctl.output import Output, Record
from tandem.clusterctl.rich_output import say
from tandem.clusterctl.suggestions import did_you_mean
from tandem.core.errors import ConfigError

app = command_app(help="How requests are routed.")


@app.command(epilog=examples("route policy", "route policy round_robin", "route policy cost --yes"))
@flagged
def policy(
    where: Where,
    consent: Consent,
    output: Output,
    wanted: Annotated[str, typer.Argument(metavar="[NAME]", help="Route by this policy from now on.")] = "",
) -> None:
    """Show the routing policy, or change it while requests run. After a restart the configured one is back."""
    with where.client() as admin:
        found = admin.policy()
        if wanted and wanted not in found["policies"]:
            todo = did_you_mean(wanted, found["policies"]) or f"there are {', '.join(found['policies'])}"
            raise ConfigError(f"there is no policy {wanted[:40]!r}", todo=todo)
        change = f"{found['policy']} → {wanted}"
        deeds = [EffectKind(deed="set", subject="policy", detail=change)] if wanted not in ("", found["policy"]) else []
        if consent.dry_run and wanted:
            change_summary.show_would(deeds, output)
            return
        if deeds:
            consent.ask(change_summary.lines_of(deeds))
            found = admin.set_policy(wanted)
    output.show("RoutingPolicy", found, _show_name if wanted else _show_policies)


@app.command(
    epilog=examples(
        'route explain "a prompt"', "route explain --tokens 17,4,256 -o json", "route explain - < prompt.txt"
    )
)
@flagged
def explain(
    where: Where,
    output: Output,
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from the standard input.")] = "",
    tokens: Annotated[str, typer.Option(help="Token ids instead of a text, such as 17,4,256.")] = "",
    file: Annotated[Path | None, typer.Option(help="A file with the prompt instead.")] = None,
    model: Annotated[str, typer.Option(help="Which served model; without it, the first.")] = "",
    max_tokens: Annotated[int, typer.Option(help="Longest answer that is asked for.")] = 16,
) -> None:
    """Show where a prompt would go now, with the cost of every choice that was weighed. Nothing is sent."""
    body: dict[str, Any] = {"prompt": _prompt(prompt, tokens, file), "max_tokens": max_tokens}
    if model:
        body["model"] = model
    with where.client() as admin:
        output.show("RoutingDecision", admin.explain(body), route_view.show)


def _show_name(found: Record, console: Console) -> None:
    say(console, found["policy"])


def _show_policies(found: Record, console: Console) -> None:
    others = [other for other in found["policies"] if other != found["policy"]]
    say(console, f"{found['policy']} (others: {', '.join(others)})")


def _prompt(text: str, tokens: str, file: Path | None) -> str | list[int]:
    """Return the prompt given; ConfigError unless there is exactly one."""
    if sum((bool(text), bool(tokens), file is not None)) != 1:
        raise ConfigError("give one prompt", todo="as a text, or with --tokens, or with --file")
    if tokens:
        try:
            return [int(token) for token in tokens.replace(",", " ").split()]
        except ValueError:
            raise ConfigError(f"--tokens is {tokens[:40]!r}", why="it must be token ids, such as 17,4,256") from None
    try:
        if file is not None:
            return file.read_text(encoding="utf-8")
        return sys.stdin.buffer.read().decode() if text == "-" else text
    except OSError as error:
        raise ConfigError("cannot read the prompt", why=str(error), todo="check --file") from error
    except UnicodeDecodeError as error:
        raise ConfigError("cannot read the prompt", why="it is no UTF-8 text", todo="convert it") from error
