"""Table of all `clusterctl` commands: module and summary of each. A module is imported when its command is called.

So `clusterctl --help` reads this table and imports nothing else. A command's module holds a typer `app`, made with
`command_app`, with one command or several; a test compares the summaries here with the help of the apps.
"""

from __future__ import annotations

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
    "join": CommandEntry("lifecycle.join", "Give this machine to a cluster on Ray, until Ctrl-C."),
    "models": CommandEntry("lifecycle.models", "Models that are called by a name: list, fetch and remove them."),
    "down": CommandEntry("lifecycle.down", "Stop a cluster and wait until it is gone."),
    "status": CommandEntry("inspect.status", "Show what runs: is it well, the pools, every worker."),
    "top": CommandEntry("inspect.top", "Show what every worker does now, until Ctrl-C."),
    "trace": CommandEntry("inspect.trace", "Show one request on one time line."),
    "logs": CommandEntry("inspect.logs", "Show what the processes of a cluster on this machine have logged."),
    "scale": CommandEntry("operate.scale", "Have so many workers of each role."),
    "flip": CommandEntry("operate.flip", "Give a worker another role."),
    "drain": CommandEntry("operate.drain", "Give a worker no new work and wait until it has none."),
    "uncordon": CommandEntry("operate.uncordon", "Give a drained worker work again."),
    "restart": CommandEntry("operate.restart", "Drain a worker, stop it and start it anew."),
    "rollout": CommandEntry("operate.rollout", "Replace workers by such of another revision, while they serve."),
    "get": CommandEntry("inspect.get", "List pools or workers."),
    "describe": CommandEntry("inspect.describe", "Show all that is known of a worker."),
    "events": CommandEntry("inspect.events", "Show what the cluster did and why."),
    "plan": CommandEntry("planning.plan", "Find the cheapest workers for a load, before there is a cluster."),
    "simulate": CommandEntry("planning.simulate", "Play requests to clusters on virtual time."),
    "net": CommandEntry("kv.net", "Show how fast KV travels, between hosts and workers."),
    "kv": CommandEntry("kv.kv", "Look after KV blocks."),
    "route": CommandEntry("gateway.route", "How requests are routed."),
    "key": CommandEntry("gateway.key", "Keys of the API."),
    "slo": CommandEntry("gateway.slo", "What requests are promised."),
    "chat": CommandEntry("chat.command", "Talk to a model in this terminal."),
    "bench": CommandEntry("loadgen.bench", "Send made-up requests at random moments to an OpenAI endpoint."),
    "replay": CommandEntry("loadgen.replay", "Send the requests of a trace to an OpenAI endpoint."),
    "doctor": CommandEntry("doctor.command", "Look for what operators trip over, and say how to mend it."),
    "config": CommandEntry("meta.config", "What a cluster is set to."),
    "completion": CommandEntry("meta.completion", "Print what makes a shell complete commands and flags."),
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


class _Loading(MutableMapping[str, Any]):
    """The commands by name; each is imported on first lookup."""

    def __init__(self, own: MutableMapping[str, Any]) -> None:
        self._loaded = dict(own)

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            app = import_module(f"tandem.clusterctl.{COMMANDS[name].module}").app
            self._loaded[name] = typer.main.get_command(app)
            self._loaded[name].name = name
        return self._loaded[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._loaded[name] = command

    def __delitem__(self, name: str) -> None:
        del self._loaded[name]

    def __contains__(self, name: object) -> bool:
        return name in COMMANDS or name in self._loaded

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*COMMANDS, *self._loaded]))

    def __len__(self) -> int:
        return len(list(iter(self)))
