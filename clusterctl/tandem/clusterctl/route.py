"""`clusterctl route policy | explain`: how requests are routed, by another policy from now on, and why."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tandem.clusterctl import route_view
from tandem.clusterctl.admin_client import AdminClient
from tandem.clusterctl.flags import AsJson, Endpoint, KeyFile, Name, StateDirFlag
from tandem.core.config import DEFAULT_CLUSTER
from tandem.core.errors import ConfigError

_FILE_WIDTH = 200

app = typer.Typer(help="How requests are routed.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def route() -> None:
    """How requests are routed."""


@app.command()
def policy(
    wanted: Annotated[str, typer.Argument(metavar="[NAME]", help="Route by this policy from now on.")] = "",
    name: Name = DEFAULT_CLUSTER,
    state_dir: StateDirFlag = "",
    endpoint: Endpoint = "",
    admin_key_file: KeyFile = "",
) -> None:
    """Show the routing policy, or change it while requests run. After a restart the configured one is back."""
    with AdminClient.find(endpoint=endpoint, admin_key_file=admin_key_file, name=name, state_dir=state_dir) as admin:
        found = admin.set_policy(wanted) if wanted else admin.policy()
    others = [other for other in found["policies"] if other != found["policy"]]
    print(found["policy"] if wanted else f"{found['policy']} (others: {', '.join(others)})")


@app.command()
def explain(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from the standard input.")] = "",
    tokens: Annotated[str, typer.Option(help="Token ids instead of a text, such as 17,4,256.")] = "",
    file: Annotated[Path | None, typer.Option(help="A file with the prompt instead.")] = None,
    model: Annotated[str, typer.Option(help="Which served model; without it, the first.")] = "",
    max_tokens: Annotated[int, typer.Option(help="Longest answer that is asked for.")] = 16,
    name: Name = DEFAULT_CLUSTER,
    state_dir: StateDirFlag = "",
    endpoint: Endpoint = "",
    admin_key_file: KeyFile = "",
    as_json: AsJson = False,
) -> None:
    """Show where a prompt would go now, with the cost of every choice that was weighed. Nothing is sent."""
    body: dict[str, Any] = {"prompt": _prompt(prompt, tokens, file), "max_tokens": max_tokens}
    if model:
        body["model"] = model
    with AdminClient.find(endpoint=endpoint, admin_key_file=admin_key_file, name=name, state_dir=state_dir) as admin:
        found = admin.explain(body)
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        route_view.show(found, Console(width=None if sys.stdout.isatty() else _FILE_WIDTH))


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
