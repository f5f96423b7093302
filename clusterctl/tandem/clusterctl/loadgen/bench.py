"""`clusterctl bench`: a made-up load on any OpenAI endpoint."""

from __future__ import annotations

from typing import Annotated

import typer

from tandem.clusterctl.commands import command_app, examples
from tandem.clusterctl.flags import flagged
from tandem.clusterctl.loadgen.requests import poisson
from tandem.clusterctl.loadgen.run import SendFlags, drive
from tandem.clusterctl.output import Output
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
    rate: Annotated[
        float, typer.Option(help="Requests a second, on average; they come whatever became of others.")
    ] = 2.0,
    requests: Annotated[int, typer.Option(help="How many are sent.")] = 100,
    prompt_tokens: Annotated[str, typer.Option(help="Lengths of prompts, each as likely.")] = "32,64,128,256,512",
    output_tokens: Annotated[str, typer.Option(help="Lengths of answers, each as likely.")] = "16,32,64",
) -> None:
    """Send made-up requests at random moments to an OpenAI endpoint, whatever became of those before: percentiles,
    goodput under an SLO, time to first token by length of prompt. Ends with 8 if --attain was missed."""
    if not rate > 0:
        raise ConfigError(f"--rate is {rate:g}", todo="Use more than 0 requests a second")
    if requests < 1:
        raise ConfigError(f"--requests is {requests}", todo="Use 1 or more")
    prompts, outputs = lengths("--prompt-tokens", prompt_tokens), lengths("--output-tokens", output_tokens)
    trace = poisson(requests=requests, rate=rate, prompts=prompts, outputs=outputs, seed=flags.seed)
    drive(flags, output, "Bench", trace)


def lengths(flag: str, text: str) -> list[int]:
    """Parse `32,64`; ConfigError if these are no lengths."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise ConfigError(f"{flag} is {text!r}", todo="Write lengths in tokens, such as 32,64,512")
    return found
