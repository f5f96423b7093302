"""`clusterctl bench | replay`: a generated load, or that of a trace, on any OpenAI endpoint."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from tandem.clusterctl.commands import command_app, examples
from tandem.clusterctl.flags import check_positive, flagged
from tandem.clusterctl.loadgen.requests import poisson
from tandem.clusterctl.loadgen.run import SendFlags, drive
from tandem.clusterctl.output import Output
from tandem.controlplane.simulator.traces import read
from tandem.core.errors import ConfigError

app = command_app()


@app.command(
    epilog=examples(
        "bench --rate 8 --requests 400 --ttft 0.5 --itl 0.05 --attain 0.95",
        "bench --prompt-tokens 128,512,2048 --output-tokens 64 --plot bench.png",
        "bench --url http://10.0.0.7:8000 --model llama --chat -o json",
    )
)
@flagged
def bench(
    flags: SendFlags,
    output: Output,
    rate: Annotated[float, typer.Option(help="Mean requests a second, sent regardless of earlier answers.")] = 2.0,
    requests: Annotated[int, typer.Option(help="Number of requests.")] = 100,
    prompt_tokens: Annotated[str, typer.Option(help="Prompt lengths, drawn uniformly.")] = "32,64,128,256,512",
    output_tokens: Annotated[str, typer.Option(help="Answer lengths, drawn uniformly.")] = "16,32,64",
) -> None:
    """Send made-up requests at random moments to an OpenAI endpoint, regardless of earlier answers: percentiles,
    goodput under an SLO, time to first token by length of prompt. Ends with 8 if --attain was missed."""
    check_positive("--rate", rate, "requests a second")
    if requests < 1:
        raise ConfigError(f"--requests is {requests}", todo="Use 1 or more")
    prompts, outputs = lengths("--prompt-tokens", prompt_tokens), lengths("--output-tokens", output_tokens)
    trace = poisson(requests=requests, rate=rate, prompts=prompts, outputs=outputs, seed=flags.seed)
    drive(flags, output, "Bench", trace)


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
    speed: Annotated[float, typer.Option(help="Factor by which arrivals are sped up.")] = 1.0,
    first: Annotated[float, typer.Option(help="Use only the first seconds of the trace; 0 = all.")] = 0.0,
    shrink: Annotated[int, typer.Option(help="Factor by which prompts and answers are shortened.")] = 1,
    limit: Annotated[int, typer.Option(help="Maximum number of requests; 0 = all.")] = 0,
) -> None:
    """Send the requests of a trace to an OpenAI endpoint when they came then: its arrivals, lengths, shared prefixes,
    with made-up tokens. Ends with 8 if --attain was missed."""
    check_positive("--speed", speed)
    if shrink < 1:
        raise ConfigError(f"--shrink is {shrink}", todo="Use 1 or more")
    found = read(trace)
    found = found.first(first) if first > 0 else found
    if limit > 0:
        found = dataclasses.replace(found, requests=found.requests[:limit])
    drive(flags, output, "Replay", found.shrunk(shrink).scaled(speed))


def lengths(flag: str, text: str) -> list[int]:
    """Parse `32,64`; ConfigError if these are no lengths."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise ConfigError(f"{flag} is {text!r}", todo="Write lengths in tokens, such as 32,64,512")
    return found
