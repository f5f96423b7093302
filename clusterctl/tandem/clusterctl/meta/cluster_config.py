"""`clusterctl config view | validate | explain`: a cluster's settings, the check of a file, the meaning of keys."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tandem.clusterctl import rich_output
from tandem.clusterctl.commands import command_app, examples
from tandem.clusterctl.flags import Name, StateFolder, flagged
from tandem.clusterctl.meta.settings import changed, every_setting, values
from tandem.clusterctl.output import Output, Record
from tandem.clusterctl.paths import find_state
from tandem.clusterctl.rich_output import say
from tandem.clusterctl.suggestions import did_you_mean
from tandem.core import config_loader
from tandem.core.config import DEFAULT_CLUSTER, ClusterConfig
from tandem.core.errors import NotFoundError

app = command_app(help="Show, check and explain the settings of a cluster.")

_File = Annotated[Path, typer.Argument(help="A TOML file, as for `up --config`.", metavar="FILE")]


@app.command(epilog=examples("config view", "config view --config cluster.toml -o wide", "config view -o yaml"))
@flagged
def view(
    output: Output,
    config: Annotated[Path | None, typer.Option(help="Configuration file, in place of that of the last start.")] = None,
    name: Name = DEFAULT_CLUSTER,
    state_dir: StateFolder = "",
) -> None:
    """Show what differs from the defaults, and with -o wide, json or yaml every setting. Passwords are left out."""
    file = config or find_state(name, state_dir).config_file
    if config is None and not file.is_file():
        raise NotFoundError(
            f"cluster {name!r} was never started here", why=f"there is no {file}", todo="Name a file with --config"
        )
    found = values(config_loader.load(file, ClusterConfig))
    output.show("Config", _document(file, found), _show_changed, wide=_show_all)


@app.command(epilog=examples("config validate cluster.toml", "config validate cluster.toml -o json"))
@flagged
def validate(output: Output, file: _File) -> None:
    """Check a file as `up` does before it starts anything: keys, types, bounds, what does not go together. Models are
    not looked for. Ends with 2 and a line that states what is wrong."""
    from tandem.controlplane.resolve import check

    config = config_loader.load(file, ClusterConfig)
    check(config)
    found = _document(file, values(config))
    output.show("ConfigCheck", {key: found[key] for key in ("file", "changed")} | {"is_valid": True}, _show_valid)


@app.command(epilog=examples("config explain router.port", "config explain worker.kv_memory_bytes -o json"))
@flagged
def explain(
    output: Output,
    key: Annotated[
        str, typer.Argument(help="A setting, a section, or a flag of `up` without its dashes.", metavar="KEY")
    ],
) -> None:
    """Show what a setting means, its default, its bounds and its flag; of a section all of them."""
    found = [dataclasses.asdict(setting) for setting in every_setting().values() if _is_meant(setting.key, key)]
    found = found or [dataclasses.asdict(one) for one in every_setting().values() if one.flag == f"--{key}"]
    if not found:
        known = [*every_setting(), *(one.flag for one in every_setting().values() if one.flag)]
        nearest = did_you_mean(key, [*known, *(one.rpartition(".")[2] for one in known)])
        raise NotFoundError(f"there is no setting {key!r}", todo=nearest or "`config view -o wide` shows all")
    output.show("ConfigKeys", {"settings": found}, _show_meaning)


def _is_meant(setting: str, key: str) -> bool:
    """True if `key` names this setting by its whole key, its section, or its name alone."""
    return key in (setting, setting.rpartition(".")[0], setting.rpartition(".")[2])


def _document(file: Path, found: dict[str, Any]) -> dict[str, Any]:
    return {"file": str(file), "settings": found, "changed": changed(found)}


def _show_changed(found: Record, console: Console) -> None:
    say(console, f"file  {found['file']}")
    if not found["changed"]:
        say(console, "every setting has its default")
        return
    _table(found, found["changed"], console)


def _show_all(found: Record, console: Console) -> None:
    say(console, f"file  {found['file']}")
    _table(found, list(found["settings"]), console)


def _table(found: Record, keys: list[str], console: Console) -> None:
    table = rich_output.table("KEY", "VALUE", "DEFAULT", "FLAG", fixed=("KEY", "FLAG"))
    for key in keys:
        setting = every_setting().get(key)
        default = _text(setting.default) if setting is not None else "–"
        table.add_row(key, _text(found["settings"][key]), default, setting.flag if setting is not None else "")
    console.print(table)


def _show_valid(found: Record, console: Console) -> None:
    say(console, f"{found['file']} is right; it changes {', '.join(found['changed']) or 'nothing'}")


def _show_meaning(found: Record, console: Console) -> None:
    for number, one in enumerate(found["settings"]):
        if number:
            say(console, "")
        say(console, one["key"])
        lines = {
            "meaning": one["text"],
            "type": one["type"],
            "bounds": one["bound"],
            "default": _text(one["default"]),
            "flag": f"clusterctl up {one['flag']}" if one["flag"] else "",
        }
        for name, text in lines.items():
            if text:
                say(console, f"  {name:<8} {text}")


def _text(value: Any) -> str:
    import json

    return "as [worker]" if value is None else json.dumps(value, ensure_ascii=False)
