"""`clusterctl scale | flip | drain | uncordon | restart`: change the number of workers, or the state of one."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tandem.clusterctl.commands import command_app, examples
from tandem.clusterctl.flags import Where, flagged
from tandem.clusterctl.operate.desired_state_update import ApplyOptions, carry_out
from tandem.clusterctl.output import Output
from tandem.core.errors import ConfigError
from tandem.core.state_enums import RoleName

app = command_app()
Worker = Annotated[str, typer.Argument(metavar="WORKER", help="Such as prefill-1.")]


@app.command(
    epilog=examples(
        "scale --prefill 2 --decode 4",
        "scale --ratio 3:1 --dry-run",
        "scale --decode 3 --current-decode 2 --yes",
    )
)
@flagged
def scale(
    where: Where,
    manner: ApplyOptions,
    output: Output,
    prefill: Annotated[int | None, typer.Option(help="Prefill workers.", min=0)] = None,
    decode: Annotated[int | None, typer.Option(help="Decode workers.", min=0)] = None,
    mixed: Annotated[int | None, typer.Option(help="Workers that do both.", min=0)] = None,
    ratio: Annotated[str, typer.Option(help="Prefill to decode, such as 3:1, over --total workers.")] = "",
    total: Annotated[int, typer.Option(help="Workers that --ratio splits; 0 = as many as there are.", min=0)] = 0,
    model: Annotated[str, typer.Option(help="Model of the workers, where the cluster has several.")] = "",
    flip: Annotated[bool, typer.Option(help="Let workers change their role instead of being replaced.")] = True,
    current_prefill: Annotated[int | None, typer.Option(help="Required present number of prefill workers.")] = None,
    current_decode: Annotated[int | None, typer.Option(help="Required present number of decode workers.")] = None,
    current_mixed: Annotated[int | None, typer.Option(help="Required present number of mixed workers.")] = None,
) -> None:
    """Set the number of workers of each role. Removed workers are drained first; requests in flight are answered.
    Ends with 5 if the cluster was changed in between or a precondition does not hold, with 6 if it takes longer than
    --timeout."""
    counts = _given(prefill=prefill, decode=decode, mixed=mixed)
    if bool(counts) == bool(ratio):
        raise ConfigError("the number of workers is not given", todo="give --prefill, --decode and --mixed, or --ratio")
    if total and not ratio:
        raise ConfigError("--total is given without --ratio", todo="give --ratio as well")
    wish: dict[str, Any] = {"verb": "scale", "model": model, "may_flip": flip}
    wish |= {"ratio": ratio_of(ratio), "total": total} if ratio else {"counts": counts}
    current = _given(prefill=current_prefill, decode=current_decode, mixed=current_mixed)
    with where.client() as admin:
        carry_out(admin, wish, manner, output, current)


@app.command(epilog=examples("flip decode-2 --to prefill", "flip decode-2 --to prefill --dry-run"))
@flagged
def flip(
    where: Where,
    manner: ApplyOptions,
    output: Output,
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="Such as decode-2.")],
    to: Annotated[RoleName, typer.Option("--to", help="New role of the worker.")],
) -> None:
    """Give a worker another role. It is drained first and keeps its weights and prefix cache; if that fails it goes
    back to its old role."""
    with where.client() as admin:
        carry_out(admin, {"verb": "flip", "worker": worker, "role": to.value}, manner, output)


@app.command(epilog=examples("drain prefill-1", "drain prefill-1 --deadline 10 --yes", "drain prefill-1 --undo"))
@flagged
def drain(
    where: Where,
    manner: ApplyOptions,
    output: Output,
    worker: Worker,
    deadline: Annotated[
        float | None,
        typer.Option(
            help="Seconds after which requests that still run move to other workers; without it, what this worker was "
            "drained with before, else 60.",
            min=0,
        ),
    ] = None,
    undo: Annotated[bool, typer.Option("--undo", help="Give it work again, as `uncordon` does.")] = False,
) -> None:
    """Give a worker no new work and wait until it has none. It keeps running until `uncordon` or `scale`."""
    wish: dict[str, Any] = {"verb": "uncordon" if undo else "drain", "worker": worker}
    if deadline is not None:
        wish["deadline_s"] = deadline
    with where.client() as admin:
        carry_out(admin, wish, manner, output)


@app.command(epilog=examples("uncordon prefill-1"))
@flagged
def uncordon(where: Where, manner: ApplyOptions, output: Output, worker: Worker) -> None:
    """Give a drained worker work again."""
    with where.client() as admin:
        carry_out(admin, {"verb": "uncordon", "worker": worker}, manner, output)


@app.command(epilog=examples("restart prefill-1", "restart prefill-1 --yes --timeout 60"))
@flagged
def restart(where: Where, manner: ApplyOptions, output: Output, worker: Worker) -> None:
    """Drain a worker, stop it and start it anew. Each call is one restart; a call that fails with 5 was none."""
    with where.client() as admin:
        carry_out(admin, {"verb": "restart", "worker": worker}, manner, output)


def ratio_of(text: str) -> list[int]:
    """Parse "3:1" to its two numbers; ConfigError if it is none."""
    parts = text.split(":")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise ConfigError(f"--ratio is {text[:40]!r}", why="it is prefill to decode workers", todo="write it like 3:1")
    return [int(part) for part in parts]


def _given(**counts: int | None) -> dict[str, int]:
    return {role: count for role, count in counts.items() if count is not None}
