"""The command: gathers the inputs, runs every check, ends with 7 if there is an error."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from tandem.clusterctl.commands import command_app, examples
from tandem.clusterctl.doctor import findings
from tandem.clusterctl.doctor.cluster_checks import ClusterChecks
from tandem.clusterctl.doctor.config_checks import ConfigChecks
from tandem.clusterctl.doctor.findings import CheckResult, Finding
from tandem.clusterctl.doctor.gpus import Gpus
from tandem.clusterctl.doctor.machine import Machine
from tandem.clusterctl.exit_codes import Exit
from tandem.clusterctl.flags import Where, flagged
from tandem.clusterctl.output import Output, Record, note
from tandem.clusterctl.paths import find_state
from tandem.clusterctl.rich_output import say
from tandem.controlplane.environment import Environment
from tandem.controlplane.state_dir import StateDir
from tandem.core import config_loader
from tandem.core.config import RouterConfig
from tandem.core.errors import ConfigError, TandemError
from tandem.engine.weight_formats import QUANTISATIONS

if TYPE_CHECKING:
    from tandem.clusterctl.admin_client import AdminClient
    from tandem.clusterctl.doctor.redis_checks import RedisChecks

_EVENTS = 500
_MARKS = {"ok": "ok     ", "warning": "WARNING", "error": "ERROR  ", "skipped": "–      "}

app = command_app()


@app.command(
    epilog=examples("doctor", "doctor --config cluster.toml", "doctor --model smollm2 -o wide", "doctor -o json")
)
@flagged
def doctor(
    where: Where,
    output: Output,
    config: Annotated[Path | None, typer.Option(help="Check this configuration, before it is started.")] = None,
    redis: Annotated[str, typer.Option(help="Check this Redis. Without it, that of the cluster.")] = "",
    model: Annotated[
        str, typer.Option(help="Say what this model will take before it is loaded: a folder, file, name or hub id.")
    ] = "",
    quantize: Annotated[str, typer.Option(help="--quantize of `up`, for --model.")] = "none",
) -> None:
    """Check for common problems, and show how to fix them: on this machine, in the configuration, in Redis and in the
    running cluster. Changes nothing. Ends with 7 if there is an error."""
    if quantize != "none" and not model:
        raise ConfigError("--quantize has no use without --model", todo="Add --model")
    if quantize not in QUANTISATIONS:
        raise ConfigError(f"--quantize is {quantize!r}", todo=f"Use one of {', '.join(QUANTISATIONS)}")
    is_seen = sys.stderr.isatty()
    found = []
    for finding in examine(where, config, redis, model, quantize):
        if is_seen:
            note(f"{finding.check} …")
        found.append(dataclasses.asdict(finding))
    counts = {
        "errors": sum(one["verdict"] == CheckResult.ERROR for one in found),
        "warnings": sum(one["verdict"] == CheckResult.WARNING for one in found),
    }
    output.show("Doctor", {**counts, "findings": found}, _show_trouble, wide=_show_all)
    if counts["errors"]:
        raise typer.Exit(Exit.UNHEALTHY)


def examine(
    where: Where, config: Path | None = None, redis_url: str = "", model: str = "", quantize: str = "none"
) -> Iterator[Finding]:
    """Yield every finding, check by check."""
    environment, state = Environment.read(), find_state(where.name, where.state_dir)
    configuration = ConfigChecks(state=state, variables=environment.variables, file=config)
    parts = (
        Machine(variables=environment.variables, state_root=state.path.parent),
        Gpus(variables=environment.variables, config=configuration.config),
        configuration,
        _redis(where, redis_url, state, configuration),
        _cluster(where, state),
    )
    if model:
        from tandem.clusterctl.doctor.model_checks import ModelChecks

        checks = ModelChecks(model=model, models_root=environment.models_root, quantize=quantize).checks()
        yield from findings.run(checks)
    for part in parts:
        yield from findings.run(part.checks())


def _redis(where: Where, given: str, state: StateDir, configuration: ConfigChecks) -> RedisChecks:
    """Check the Redis that was given, else that of the cluster running here, else the configured one."""
    from tandem.clusterctl.doctor.redis_checks import RedisChecks

    file = state.config_dir / "router-0.json"
    is_running = configuration.file is None and state.is_held() and file.is_file()
    try:
        if not given and is_running:
            given = config_loader.load(file, RouterConfig).redis_url
        return RedisChecks(url=given or configuration.config().redis.url, cluster=where.name)
    except ConfigError as error:  # a wrong configuration is a finding of its own
        return RedisChecks(url="", cluster=where.name, trouble=error.what if is_running else "")


def _cluster(where: Where, state: StateDir) -> ClusterChecks:
    """Check the cluster: one that was named or runs here must answer; without any, pass."""
    try:
        with where.client() as admin:
            return ClusterChecks(status=admin.status(), net=admin.net(), events=_events(admin))
    except TandemError as error:
        why = f"{error.what}: {error.why}" if error.why else error.what
        if where.endpoint or state.is_held():
            return ClusterChecks(status=None, net=None, why=why, fix=error.todo or "`clusterctl logs router`")
        return ClusterChecks(status=None, net=None, why=error.what)


def _events(admin: AdminClient) -> list[Record] | None:
    """Return the latest events; None if the cluster keeps none."""
    try:
        return list(admin.events(count=_EVENTS)["events"])
    except TandemError:  # no store behind it
        return None


def _show_trouble(found: Record, console: Console) -> None:
    shown = [one for one in found["findings"] if one["verdict"] in (CheckResult.WARNING, CheckResult.ERROR)]
    _lines(shown, console)
    fine = sum(one["verdict"] == CheckResult.OK for one in found["findings"])
    say(
        console,
        f"{found['errors']} errors, {found['warnings']} warnings; {fine} checks found nothing (-o wide shows them)",
    )


def _show_all(found: Record, console: Console) -> None:
    _lines(found["findings"], console)
    say(console, f"{found['errors']} errors, {found['warnings']} warnings")


def _lines(shown: list[Record], console: Console) -> None:
    for one in shown:
        say(console, f"{_MARKS[one['verdict']]} {one['check']:<17} {one['what']}")
        if one["fix"]:
            say(console, f"{'':<25} fix: {one['fix']}")
