"""`clusterctl route policy | explain`: how requests are routed, by another policy from now on, and why."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from tandem.clusterctl import page, route_view
from tandem.clusterctl.flags import AsJson, Where, on_cluster
from tandem.core.errors import ConfigError

app = typer.Typer(help="How requests are routed.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def route() -> None:
    """How requests are routed."""


@app.command()
@on_cluster
def policy(
    where: Where,
    wanted: Annotated[str, typer.Argument(metavar="[NAME]", help="Route by this policy from now on.")] = "",
) -> None:
    """Show the routing policy, or change it while requests run. After a restart the configured one is back."""
    with where.client() as admin:
        found = admin.set_policy(wanted) if wanted else admin.policy()
    others = [other for other in found["policies"] if other != found["policy"]]
    print(found["policy"] if wanted else f"{found['policy']} (others: {', '.join(others)})")


@app.command()
@on_cluster
def explain(
    where: Where,
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from the standard input.")] = "",
    tokens: Annotated[str, typer.Option(help="Token ids instead of a text, such as 17,4,256.")] = "",
    file: Annotated[Path | None, typer.Option(help="A file with the prompt instead.")] = None,
    model: Annotated[str, typer.Option(help="Which served model; without it, the first.")] = "",
    max_tokens: Annotated[int, typer.Option(help="Longest answer that is asked for.")] = 16,
    as_json: AsJson = False,
) -> None:
    """Show where a prompt would go now, with the cost of every choice that was weighed. Nothing is sent."""
    body: dict[str, Any] = {"prompt": _prompt(prompt, tokens, file), "max_tokens": max_tokens}
    if model:
        body["model"] = model
    with where.client() as admin:
        page.show(admin.explain(body), route_view.show, as_json=as_json)


def _prompt(text: str, tokens: str, file: Path | None) -> str | list[int]:
    """What was given; ConfigError unless it is exactly one of them."""
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
