"""`clusterctl rollout start | status | pause | resume | undo`: replaces workers by those of another revision."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tandem.clusterctl.commands import command_app, examples
from tandem.clusterctl.exit_codes import Exit
from tandem.clusterctl.flags import Where, check_positive, flagged
from tandem.clusterctl.operate import rollout_view
from tandem.clusterctl.operate.desired_state_update import ApplyOptions, propose_until_written, show_change
from tandem.clusterctl.output import Output
from tandem.core.errors import ConfigError

app = command_app(help="Replace workers by those of another revision, while they serve.")
Model = Annotated[str, typer.Option(help="Model of the workers, where the cluster has several.")]
Current = Annotated[str, typer.Option(help="Required present revision of the workers.", metavar="REVISION")]


@app.command(
    epilog=examples(
        "rollout start --model-path models/next",
        "rollout start --set worker.chunk_tokens=256 --dry-run",
        "rollout start --set worker.max_sequences=32 --max-unavailable 1 --yes",
    )
)
@flagged
def start(
    where: Where,
    manner: ApplyOptions,
    output: Output,
    model_path: Annotated[str, typer.Option(help="Folder with the model's files, where workers run.")] = "",
    set: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="A setting of workers, such as worker.chunk_tokens=256; repeatable.", metavar="KEY=VALUE"
        ),
    ] = None,
    revision: Annotated[str, typer.Option(help="Name of the revision; without it, a digest of its content.")] = "",
    max_surge: Annotated[int, typer.Option(help="Additional workers of each role that may run.", min=0)] = 1,
    max_unavailable: Annotated[int, typer.Option(help="Workers of each role that may be missing.", min=0)] = 0,
    model: Model = "",
    current_revision: Current = "",
) -> None:
    """Start replacing workers by those of another revision, and wait until all are replaced.
    A revision is the present configuration with the given changes. Only workers of one revision work together. If a
    new one does not work, the rollout stops and this ends with 2; `rollout undo` goes back."""
    settings = dict(_setting(text) for text in set or [])
    if not (model_path or settings or revision):
        raise ConfigError("no change is given", todo="give --model-path, --set or --revision")
    if max_surge + max_unavailable < 1:
        raise ConfigError("--max-surge and --max-unavailable are 0", todo="let one of them be 1 or more")
    wish = {
        "model_path": model_path,
        "settings": settings,
        "revision": revision,
        "max_surge": max_surge,
        "max_unavailable": max_unavailable,
        "current_revision": current_revision,
    }
    _carry_out(where, manner, output, "start", model, wish)


@app.command(epilog=examples("rollout status", "rollout status --wait --timeout 300", "rollout status -o json"))
@flagged
def status(
    where: Where,
    output: Output,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until no rollout is in progress.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds to wait; then the command ends with 6.")] = 600.0,
    model: Model = "",
) -> None:
    """Show how far rollouts are: revisions, and how many workers of each. Ends with 7 if one has stopped by itself;
    with --wait also with 5 if one is paused."""
    with where.client() as admin:
        if wait:
            rollout_view.wait(admin, model, timeout)
        found = rollout_view.look(admin, model)
    output.show("RolloutList", found, rollout_view.show, wide=rollout_view.show_wide)
    if any(row["phase"] == "failed" for row in found["items"]):
        raise typer.Exit(Exit.UNHEALTHY)
    held = next((row for row in found["items"] if row["phase"] == "paused"), None)
    if wait and held is not None:
        raise rollout_view.paused(held)


@app.command(epilog=examples("rollout pause", "rollout pause --yes"))
@flagged
def pause(
    where: Where, manner: ApplyOptions, output: Output, model: Model = "", current_revision: Current = ""
) -> None:
    """Leave a rollout where it is: workers of both revisions go on. Workers that are starting or leaving finish
    that."""
    _carry_out(where, manner, output, "pause", model, {"current_revision": current_revision})


@app.command(epilog=examples("rollout resume", "rollout resume --yes --no-wait"))
@flagged
def resume(
    where: Where, manner: ApplyOptions, output: Output, model: Model = "", current_revision: Current = ""
) -> None:
    """Let a rollout go on, after a pause or after it has stopped by itself, and wait until it is over."""
    _carry_out(where, manner, output, "resume", model, {"current_revision": current_revision})


@app.command(epilog=examples("rollout undo", "rollout undo --yes --timeout 120"))
@flagged
def undo(where: Where, manner: ApplyOptions, output: Output, model: Model = "", current_revision: Current = "") -> None:
    """Go back to the revision before, half way or afterwards, and wait until all workers are of it.
    A second call changes nothing."""
    _carry_out(where, manner, output, "undo", model, {"current_revision": current_revision})


def _carry_out(where: Where, manner: ApplyOptions, output: Output, step: str, model: str, more: dict[str, Any]) -> None:
    check_positive("--timeout", manner.timeout, "seconds")
    wish = {"verb": "rollout", "step": step, "model": model, **more}
    with where.client() as admin:
        found = propose_until_written(admin, wish, manner)
        if manner.wait and not manner.dry_run and step != "pause":
            rollout_view.wait(admin, model, manner.timeout, found["after"]["rollouts"])
    show_change(found, manner, output)


def _setting(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise ConfigError(f"--set is {text[:80]!r}", todo="write it like worker.chunk_tokens=256")
    return key.strip(), value.strip()
