"""Table of all `clusterctl` commands: module and summary of each. A module is imported when its command is called.

So `clusterctl --help` reads this table and imports nothing else. A command's module holds a typer `app`, made with
`command_app`: one command, several of this table, or a group of subcommands. A test compares the summaries here with
the help of the apps.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

import typer
import typer.main
from typer.core import TyperGroup


@dataclass(frozen=True, slots=True)
class CommandEntry:
    """A command in the table: a module of tandem.clusterctl, and its summary."""

    module: str
    summary: str


COMPLETE_VAR: Final = "_CLUSTERCTL_COMPLETE"
"""Variable that a shell sets to ask for word completion."""

COMMANDS: Final[dict[str, CommandEntry]] = {
    "up": CommandEntry("lifecycle.up", "Start a cluster on this machine and keep it running in the foreground."),
    "join": CommandEntry("lifecycle.join", "Add this machine to a cluster on Ray, until Ctrl-C."),
    "models": CommandEntry("lifecycle.models", "List, fetch and remove models that have a name."),
    "down": CommandEntry("lifecycle.down", "Stop a cluster and wait until it is gone."),
    "status": CommandEntry("inspect.status", "Show the health of a cluster, its pools and every worker."),
    "top": CommandEntry("inspect.top", "Show what every worker does now, until Ctrl-C."),
    "trace": CommandEntry("inspect.trace", "Show one request on one time line."),
    "logs": CommandEntry("inspect.logs", "Show what the processes of a cluster on this machine have logged."),
    "scale": CommandEntry("operate.worker_commands", "Set the number of workers of each role."),
    "flip": CommandEntry("operate.worker_commands", "Give a worker another role."),
    "drain": CommandEntry("operate.worker_commands", "Give a worker no new work and wait until it has none."),
    "uncordon": CommandEntry("operate.worker_commands", "Give a drained worker work again."),
    "restart": CommandEntry("operate.worker_commands", "Drain a worker, stop it and start it anew."),
    "rollout": CommandEntry("operate.rollout", "Replace workers by those of another revision, while they serve."),
    "get": CommandEntry("inspect.get", "List pools or workers."),
    "describe": CommandEntry("inspect.describe", "Show the state of a worker, and its events."),
    "events": CommandEntry("inspect.events", "Show what the cluster did and why."),
    "plan": CommandEntry("planning.plan", "Find the cheapest workers for a load, before there is a cluster."),
    "simulate": CommandEntry("planning.simulate", "Simulate clusters under a load, on virtual time."),
    "net": CommandEntry("kv.net", "Show the speed of links that carry KV, between hosts and workers."),
    "kv": CommandEntry("kv.audit", "Audit held KV blocks."),
    "route": CommandEntry("serving_policy.route", "Show, change and explain how requests are routed."),
    "key": CommandEntry("serving_policy.key", "Create, list and revoke API keys."),
    "slo": CommandEntry("serving_policy.slo", "Show and change SLO classes."),
    "chat": CommandEntry("chat.command", "Chat with a model in this terminal."),
    "bench": CommandEntry("loadgen.commands", "Send made-up requests at random moments to an OpenAI endpoint."),
    "replay": CommandEntry("loadgen.commands", "Send the requests of a trace to an OpenAI endpoint."),
    "doctor": CommandEntry("doctor.command", "Check for common problems, and show how to fix them."),
    "config": CommandEntry("meta.cluster_config", "Show, check and explain the settings of a cluster."),
    "completion": CommandEntry("meta.completion", "Print the script with which a shell completes commands and flags."),
    "version": CommandEntry("meta.version", "Show the version of this program and of the cluster."),
}
"""In the order of the help: running a cluster first, then inspecting it, the program itself last."""


def command_app(*, help: str = "") -> typer.Typer:
    """Return an app for the table: with `help` for several commands (`clusterctl kv audit`), without it for one."""
    app = typer.Typer(
        help=help or None,
        no_args_is_help=bool(help),
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    if help:
        app.callback()(_several(help))
    return app


def examples(*lines: str) -> str:
    """Return the end of a command's help: lines to copy."""
    shown = "\n".join(f"  clusterctl {line}" for line in lines)
    return f"\b\nExamples:\n{shown}"


def _several(text: str) -> Callable[[], None]:
    """Return a callback that makes typer take even one command by its name."""

    def callback() -> None: ...

    callback.__doc__ = text
    return callback


class Program(TyperGroup):
    """`clusterctl` itself."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.commands: MutableMapping[str, Any] = _Loading(self.commands)

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, listed.summary) for name, listed in COMMANDS.items()])


class _Loading(UserDict[str, Any]):
    """The commands by name; each is imported on first lookup."""

    def __missing__(self, name: str) -> Any:
        app = import_module(f"tandem.clusterctl.{COMMANDS[name].module}").app
        found: Any = typer.main.get_command(app)
        command = self[name] = getattr(found, "commands", {}).get(name, found)
        command.name = name
        return command

    def __contains__(self, name: object) -> bool:
        return name in COMMANDS or name in self.data

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*COMMANDS, *self.data]))

    def __len__(self) -> int:
        return len(list(iter(self)))
