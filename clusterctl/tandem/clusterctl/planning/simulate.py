"""`clusterctl simulate splits | map`: clusters on virtual time, with the router's and the engine's own code."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tandem.clusterctl.commands import command_app, examples
from tandem.clusterctl.flags import flagged
from tandem.clusterctl.output import Output, Record, check_picture, note, progress_bar
from tandem.clusterctl.planning.load_flags import LoadFlags, calibration
from tandem.core.config import SloSection
from tandem.core.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from tandem.controlplane.simulator.sweep import Point

_MADE_UP = 500

app = command_app(help="Simulate clusters under a load, on virtual time.")

Calibrated = Annotated[Path | None, typer.Option("--calibration", help="Measured rates; without it, an H100's.")]
Workers = Annotated[int, typer.Option(help="Total number of workers.")]
Picture = Annotated[Path | None, typer.Option(help="Output file of a picture: .svg, .png or .pdf.")]


@app.command(
    epilog=examples(
        "simulate splits --rate 20 --isl 1500 --osl 200 --workers 8",
        "simulate splits --trace requests.csv --scale 8 --seconds 600 --picture splits.svg",
    )
)
@flagged
def splits(
    load: LoadFlags,
    output: Output,
    workers: Workers = 8,
    calibration_file: Calibrated = None,
    picture: Picture = None,
) -> None:
    """Show the goodput of every split of the workers, and of all of them mixed, under one load."""
    from tandem.controlplane.simulator.sweep import over_splits

    _check(workers, picture)
    kind, trace = calibration(calibration_file), load.requests(_MADE_UP)
    with progress_bar("splits") as progress:
        rows = over_splits(kind, trace, workers, load.promise, progress)
    best = max(rows, key=lambda row: row.goodput_per_s)
    found = {
        "requests": trace.name,
        "rate": trace.rate,
        "calibration": kind.name,
        "promised": asdict(load.promise),
        "best": str(best.split),
        "splits": [{**asdict(row), "split": str(row.split)} for row in rows],
    }
    output.show("SplitSweep", found, _show_splits)
    if picture is not None:
        from tandem.controlplane.simulator.plots import of_splits

        of_splits(rows, f"{trace.name}, {trace.rate:.1f}/s on {workers} workers", picture)
        note(f"clusterctl: the picture is in {picture}.")


@app.command(
    "map",
    epilog=examples(
        "simulate map --picture map.svg",
        "simulate map --prompt 512 --prompt 4096 --answer 32 --answer 512 --load 0.7 --link 1e9 -o json",
    ),
)
@flagged
def map_(
    output: Output,
    prompt: Annotated[list[int] | None, typer.Option(help="Tokens of a prompt. May be given several times.")] = None,
    answer: Annotated[list[int] | None, typer.Option(help="Tokens of an answer. May be given several times.")] = None,
    load: Annotated[list[float] | None, typer.Option(help="Share of the workers' maximum load.")] = None,
    link: Annotated[list[float] | None, typer.Option(help="Bytes per second between two workers.")] = None,
    workers: Workers = 4,
    requests: Annotated[int, typer.Option(help="Requests at every point of the map.")] = 150,
    slo_ttft: Annotated[float, typer.Option(help="SLO: seconds to the first token.")] = 2.0,
    slo_itl: Annotated[float, typer.Option(help="SLO: seconds for each token after it.")] = 0.05,
    calibration_file: Calibrated = None,
    picture: Picture = None,
) -> None:
    """Show when not to disaggregate: prompt length × answer length × load × link.

    At every point the best split of the workers plays against all of them mixed; and pairs always, never, and by cost.
    """
    from tandem.controlplane.simulator.sweep import Axes, when_to_disaggregate

    _check(workers, picture)
    usual = Axes()
    axes = Axes(
        prompts=prompt or usual.prompts, outputs=answer or usual.outputs, loads=load or usual.loads,
        links_bytes_per_s=link or usual.links_bytes_per_s, workers=workers, requests=requests,
    )  # fmt: skip
    for flag, values in (("--prompt", axes.prompts), ("--answer", axes.outputs), ("--load", axes.loads),
                         ("--link", axes.links_bytes_per_s), ("--requests", [requests])):  # fmt: skip
        for value in values:
            if not 0 < value < math.inf:
                raise ConfigError(f"{flag} is {value:g}", todo="Use more than 0")
    kind = calibration(calibration_file)
    with progress_bar("points") as progress:
        points = when_to_disaggregate(kind, axes, SloSection(ttft_s=slo_ttft, itl_s=slo_itl), progress)
    found = {
        "calibration": kind.name,
        "workers": workers,
        "promised": {"ttft_s": slo_ttft, "itl_s": slo_itl},
        "points": [_point(point) for point in points],
    }
    output.show("DisaggregationMap", found, _show_map)
    if picture is not None:
        from tandem.controlplane.simulator.plots import of_map

        of_map(points, f"{workers} workers", picture)
        note(f"clusterctl: the picture is in {picture}.")


def _check(workers: int, picture: Path | None) -> None:
    if workers < 2:
        raise ConfigError(f"--workers is {workers}", why="a prefill and a decode worker are two", todo="Use 2 or more")
    if picture is not None:
        check_picture("--picture", picture)


def _point(point: Point) -> dict[str, Any]:
    return {**asdict(point), "gain": point.gain, "nearness": point.nearness}


def _show_splits(found: Record, console: Console) -> None:
    from tandem.clusterctl import rich_output

    rich_output.say(console, f"{found['requests']}, {found['rate']:.2f} a second; {found['calibration']}")
    columns = ("SPLIT", "GOODPUT", "KEPT", "TTFT P90", "TPOT P90", "")
    made = rich_output.table(*columns, right=columns[1:5], fixed=columns[:1])
    for row in found["splits"]:
        made.add_row(
            row["split"], f"{row['goodput_per_s']:.2f}/s", f"{row['attained']:.1%}", f"{row['ttft_p90_s']:.2f} s",
            f"{1000 * row['tpot_p90_s']:.0f} ms", "best" if row["split"] == found["best"] else "",
        )  # fmt: skip
    console.print(made)


def _show_map(found: Record, console: Console) -> None:
    from tandem.clusterctl import rich_output

    rich_output.say(console, f"{found['workers']} workers; {found['calibration']}")
    columns = ("PROMPT", "ANSWER", "LOAD", "LINK", "AUTO", "ALWAYS", "NEVER", "MIXED", "NEAR", "GAIN", "SPLIT")
    made = rich_output.table(*columns, right=columns[:10])
    for point in found["points"]:
        ways = [f"{point['by_way'][way]:.0%}" for way in ("auto", "always", "never", "mixed")]
        made.add_row(
            str(point["prompt_tokens"]), str(point["output_tokens"]), f"{point['load']:.0%}",
            f"{point['link_bytes_per_s'] / 1e9:g} GB/s", *ways, f"{point['nearness']:.2f}", f"{point['gain']:+.0%}",
            point["splits"]["always"],
        )  # fmt: skip
    console.print(made)
