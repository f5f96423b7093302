"""Parts shared by `bench` and `replay`: their flags, the way to the endpoint, the run, the output."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tandem.clusterctl import rich_output
from tandem.clusterctl.endpoint import EndpointFlags, first_model
from tandem.clusterctl.exit_codes import Exit
from tandem.clusterctl.loadgen import plots
from tandem.clusterctl.loadgen.client import CHAT, COMPLETIONS, Due, Target, TimedAnswer, send_all
from tandem.clusterctl.loadgen.requests import RequestForm, plan_of
from tandem.clusterctl.loadgen.results import PERCENTILES, Slo, report
from tandem.clusterctl.output import Output, Record, check_file, check_picture, document, note, progress_bar
from tandem.clusterctl.rich_output import say
from tandem.controlplane.simulator.traces import RequestLog
from tandem.core.errors import ConfigError, UnavailableError

_ROWS = {"ttft_s": "TTFT", "tpot_s": "TPOT", "itl_s": "ITL", "e2e_s": "END TO END", "sent_late_s": "SENT LATE"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SendFlags(EndpointFlags):
    """Flags for the endpoint, the form of requests, the promises, and the output files."""

    chat: Annotated[bool, typer.Option("--chat", help="Send chat messages of words, not token ids.")] = False
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos/--no-ignore-eos", help="Ask for answers of full length, if the server can.")
    ] = True
    seed: Annotated[int, typer.Option(help="Seed of prompts and arrivals.")] = 1
    ttft: Annotated[float, typer.Option(help="SLO: seconds to the first token; 0 = none.")] = 0.0
    itl: Annotated[float, typer.Option(help="SLO: seconds a token after it, on average; 0 = none.")] = 0.0
    attain: Annotated[
        float, typer.Option(help="Share of requests that must keep the SLO, such as 0.95; else it ends with 8.")
    ] = 0.0
    timeout: Annotated[float, typer.Option(help="Seconds after which a request fails.")] = 600.0
    out: Annotated[Path | None, typer.Option(help="Write the document into this file too, as JSON.")] = None
    plot: Annotated[Path | None, typer.Option(help="Save pictures: a file ending in .png, .svg or .pdf.")] = None

    def slo(self) -> Slo:
        """Return the promises; ConfigError for a share or seconds that are none."""
        if not 0 <= self.attain <= 1:
            raise ConfigError(f"--attain is {self.attain:g}", todo="Use a share from 0 to 1")
        if self.attain and not (self.ttft or self.itl):
            raise ConfigError("--attain is given without an SLO", todo="Give --ttft or --itl, in seconds")
        for flag, value in (("--ttft", self.ttft), ("--itl", self.itl)):
            if not 0 <= value < math.inf:
                raise ConfigError(f"{flag} is {value:g}", todo="Use 0 or more seconds")
        return Slo(ttft_s=self.ttft, itl_s=self.itl, least_share=self.attain)


def drive(flags: SendFlags, output: Output, kind: str, trace: RequestLog) -> None:
    """Send the trace, show and write the results. Ends with 8 if the SLO was not kept, 1 if there was no response at
    all."""
    slo = flags.slo()
    if flags.out is not None:
        check_file("--out", flags.out)
    if flags.plot is not None:
        check_picture("--plot", flags.plot)
    url = flags.address()
    target = Target.of(url, CHAT if flags.chat else COMPLETIONS, is_strict=True)
    headers = flags.headers()
    form = RequestForm(
        model=flags.model or first_model(url, headers, target.tls),
        is_chat=flags.chat,
        ignores_eos=flags.ignore_eos,
        headers=headers,
    )
    note(f"{len(trace.requests)} requests in {trace.span_s:.1f} s ({trace.rate:.2f}/s) to {url}, model {form.model}")
    answers = _run(target, plan_of(trace, form, flags.seed), flags.timeout)
    found = {"url": url, "model": form.model, "load": trace.name, "seed": flags.seed, **report(trace, answers, slo)}
    try:
        output.show(kind, found, show)  # first: the results are not lost if a file cannot be written,
    finally:  # nor a file if the output has no reader
        if flags.out is not None:
            flags.out.write_text(json.dumps(document(kind, found), indent=1) + "\n")
            note(f"written: {flags.out}")
        if flags.plot is not None:
            plots.save(flags.plot, f"{trace.name} to {form.model}", trace, answers, slo)
            note(f"drawn: {flags.plot}")
    if found["failed"] == found["requests"]:
        raise UnavailableError(
            "no request was answered", why=found["errors"][0]["error"], todo="Check --url and --model"
        )
    if not found["slo"]["is_met"]:
        note(f"the SLO was kept by {found['slo']['share']:.1%} of the requests, not {slo.least_share:.1%}")
        raise typer.Exit(Exit.SLO_MISSED)


def show(found: Record, console: Console) -> None:
    """Print the figures as lines and tables."""
    say(console, f"requests    {found['requests']}, {found['failed']} failed, in {found['took_s']:.1f} s")
    say(console, f"throughput  {found['requests_per_s']:.2f} requests/s, {found['output_tokens_per_s']:.1f} tokens/s")
    slo = found["slo"]
    if slo["ttft_s"] or slo["itl_s"]:
        promises = [f"{name} {slo[key]:g} s" for key, name in (("ttft_s", "TTFT"), ("itl_s", "ITL")) if slo[key]]
        kept = f"kept by {slo['share']:.1%}: {slo['goodput_requests_per_s']:.2f} requests/s"
        say(console, f"goodput     {' and '.join(promises)} {kept}")
    figures = [f"p{percent}" for percent in PERCENTILES]
    table = rich_output.table(
        "MS", "MEAN", *map(str.upper, figures), "MAX", right=("MEAN", *map(str.upper, figures), "MAX")
    )
    for key, name in _ROWS.items():
        if found[key] is not None:
            table.add_row(name, *(f"{found[key][part] * 1000:.1f}" for part in ("mean", *figures, "max")))
    console.print(table)
    table = rich_output.table("PROMPT, TOKENS", "REQUESTS", "TTFT P50", "P99", right=("REQUESTS", "TTFT P50", "P99"))
    for row in found["ttft_by_prompt"]:
        spread = row["ttft_s"]
        cells = (f"{spread['p50'] * 1000:.1f}", f"{spread['p99'] * 1000:.1f}")
        table.add_row(f"up to {row['prompt_tokens']:,}", str(row["requests"]), *cells)
    console.print(table)
    for one in found["errors"]:
        say(console, f"failed {one['requests']} times: {one['error']}")


def _run(target: Target, plan: Sequence[Due], timeout_s: float) -> list[TimedAnswer]:
    done = itertools.count(1)
    with progress_bar("answered") as progress:
        return asyncio.run(send_all(target, plan, timeout_s, lambda answer: progress(next(done), len(plan))))
