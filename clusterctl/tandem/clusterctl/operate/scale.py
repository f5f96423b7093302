"""`clusterctl scale`: sets the number of workers of each role."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tandem.clusterctl.commands import command_app, examples
from tandem.clusterctl.flags import Where, flagged
from tandem.clusterctl.operate.apply import ApplyOptions, carry_out
from tandem.clusterctl.output import Output
from tandem.core.errors import ConfigError

app = command_app()


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
    model: Annotated[str, typer.Option(help="Whose workers, where the cluster has several models.")] = "",
    flip: Annotated[bool, typer.Option(help="Let workers change their role instead of being replaced.")] = True,
    current_prefill: Annotated[int | None, typer.Option(help="Only if there are so many prefill workers.")] = None,
    current_decode: Annotated[int | None, typer.Option(help="Only if there are so many decode workers.")] = None,
    current_mixed: Annotated[int | None, typer.Option(help="Only if there are so many mixed workers.")] = None,
) -> None:
    """Set the number of workers of each role. Removed workers are drained first; requests in flight are answered.
    Ends with 5 if the cluster was changed in between or a precondition does not hold, with 6 if it takes longer than
    --timeout."""
    counts = _given(prefill=prefill, decode=decode, mixed=mixed)
    if bool(counts) == bool(ratio):
        raise ConfigError("say how many workers", todo="give --prefill, --decode and --mixed, or --ratio")
    if total and not ratio:
        raise ConfigError("--total is given without --ratio", todo="give --ratio as well")
    wish: dict[str, Any] = {"verb": "scale", "model": model, "may_flip": flip}
    wish |= {"ratio": ratio_of(ratio), "total": total} if ratio else {"counts": counts}
    current = _given(prefill=current_prefill, decode=current_decode, mixed=current_mixed)
    with where.client() as admin:
        carry_out(admin, wish, manner, output, current)


def ratio_of(text: str) -> list[int]:
    """Parse "3:1" to its two numbers; ConfigError if it is none."""
    parts = text.split(":")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise ConfigError(f"--ratio is {text[:40]!r}", why="it is prefill to decode workers", todo="write it like 3:1")
    return [int(part) for part in parts]


def _given(**counts: int | None) -> dict[str, int]:
    return {role: count for role, count in counts.items() if count is not None}
