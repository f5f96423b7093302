"""`clusterctl replay TRACE`: the arrivals, lengths and shared prefixes of a trace on any OpenAI endpoint."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from tandem.clusterctl.commands import command_app, examples
from tandem.clusterctl.flags import flagged
from tandem.clusterctl.loadgen.run import SendFlags, drive
from tandem.clusterctl.output import Output
from tandem.controlplane.simulator.traces import RequestLog, read
from tandem.core.errors import ConfigError

app = command_app()


@app.command(
    epilog=examples(
        "replay azure_code_2023.csv --first 600 --shrink 8",
        "replay mooncake_conversation.jsonl --speed 2 --ttft 2 --attain 0.9 --plot replay.svg",
    )
)
@flagged
def replay(
    flags: SendFlags,
    output: Output,
    trace: Annotated[
        Path, typer.Argument(help="Mooncake's JSON lines (.jsonl) or Azure's CSV (.csv).", metavar="TRACE")
    ],
    speed: Annotated[float, typer.Option(help="So many times as fast.")] = 1.0,
    first: Annotated[float, typer.Option(help="Only the first so many seconds of the trace; 0 = all.")] = 0.0,
    shrink: Annotated[int, typer.Option(help="Prompts and answers so many times shorter.")] = 1,
    limit: Annotated[int, typer.Option(help="At most so many requests; 0 = all.")] = 0,
) -> None:
    """Send the requests of a trace to an OpenAI endpoint when they came then: its arrivals, lengths, shared prefixes,
    with made-up tokens. Ends with 8 if --attain was missed."""
    if not speed > 0:
        raise ConfigError(f"--speed is {speed:g}", todo="Use more than 0")
    if shrink < 1:
        raise ConfigError(f"--shrink is {shrink}", todo="Use 1 or more")
    found = read(trace)
    found = found.first(first) if first > 0 else found
    found = _limited(found, limit).shrunk(shrink).scaled(speed)
    drive(flags, output, "Replay", found)


def _limited(trace: RequestLog, limit: int) -> RequestLog:
    return dataclasses.replace(trace, requests=trace.requests[:limit]) if limit > 0 else trace
