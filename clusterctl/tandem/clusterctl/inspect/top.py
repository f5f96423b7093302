"""`clusterctl top`: the activity of every worker, refreshed every second."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tandem.clusterctl import rich_output
from tandem.clusterctl.commands import command_app, examples
from tandem.clusterctl.flags import Where, flagged
from tandem.clusterctl.inspect import status_view
from tandem.clusterctl.inspect.histograms import Scrape
from tandem.clusterctl.inspect.status_summary import kv_share, overview
from tandem.clusterctl.inspect.status_view import share
from tandem.clusterctl.output import Output, Record, ms
from tandem.core import metric_names as names
from tandem.core.errors import ConfigError, UnavailableError

if TYPE_CHECKING:
    from tandem.clusterctl.admin_client import AdminClient

_LEAST_S, _MOST_S = 0.1, 86_400.0
_QUIET_S = 30.0

app = command_app()


class Sort(StrEnum):
    NAME = "name"
    QUEUE = "queue"
    RUNNING = "running"
    KV = "kv"


_ORDER: dict[Sort, Callable[[Record], Any]] = {
    Sort.NAME: lambda worker: worker["worker"],
    Sort.QUEUE: lambda worker: -worker["queued_tokens"],
    Sort.RUNNING: lambda worker: -worker["running_requests"],
    Sort.KV: lambda worker: -(worker["kv_share"] or 0.0),
}


@app.command(epilog=examples("top", "top --sort kv --every 2", "top -o json", "top --follow --every 5 -o json"))
@flagged
def top(
    where: Where,
    output: Output,
    sort: Annotated[Sort, typer.Option(help="Sort order of the workers.")] = Sort.NAME,
    every: Annotated[float, typer.Option(help="Seconds between two updates; figures are of that time.")] = 1.0,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep updating also without a terminal, and with -o json or yaml.")
    ] = False,
    once: Annotated[bool, typer.Option("--once", help="Print once and end, as without a terminal.")] = False,
) -> None:
    """Show what every worker does now, until Ctrl-C; once where there is no terminal, and with -o json or yaml. With
    --follow programs get one document a line."""
    if not _LEAST_S <= every <= _MOST_S:
        raise ConfigError(f"--every is {every:g}", todo=f"Use {_LEAST_S:g} to {_MOST_S:g} seconds")
    if follow and once:
        raise ConfigError("--follow and --once exclude each other", todo="Give one of them")
    with where.client() as admin:
        scene, console = Scene(admin, sort), rich_output.console()
        is_picture = console.is_terminal and not output.is_document
        if once or not (is_picture or follow):
            output.show("Top", scene.look(), show)
        elif is_picture:
            _picture(scene, console, every)
        else:
            _stream(scene, output, every)


def _picture(scene: Scene, console: Console, every_s: float) -> None:
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                live.update(drawn(scene.look()), refresh=True)
            except UnavailableError as error:  # it may be starting again
                live.update(Text(error.message), refresh=True)
            time.sleep(every_s)


def _stream(scene: Scene, output: Output, every_s: float) -> None:
    """Print one document after the other, the first at once. UnavailableError if the router does not answer for a
    while."""
    output.stream("Top", scene.look(), as_text)
    heard_s = time.monotonic()
    while True:
        time.sleep(every_s)
        try:
            found = scene.look()
        except UnavailableError:  # the router may be starting again
            if time.monotonic() - heard_s > max(_QUIET_S, every_s):
                raise
            continue
        output.stream("Top", found, as_text)
        heard_s = time.monotonic()


class Scene:
    """Polls one cluster; figures are of the time between two polls, of the first poll since the start."""

    def __init__(self, admin: AdminClient, sort: Sort, clock: Callable[[], float] = time.monotonic) -> None:
        self._admin, self._sort, self._clock = admin, sort, clock
        self._last: tuple[float, Scrape] | None = None

    def look(self) -> dict[str, Any]:
        """Return a document of the kind Top."""
        status, scrape, now_s = self._admin.status(), Scrape.parse(self._admin.metrics()), self._clock()
        window_s = now_s - self._last[0] if self._last is not None else None
        recent = scrape.since(self._last[1]) if self._last is not None else scrape
        self._last = now_s, scrape
        seen = overview(status, recent)
        workers = sorted(map(_worker, status["workers"]), key=_ORDER[self._sort])
        return {
            "cluster": status["cluster"],
            "health": seen["health"],
            "window_s": window_s,
            "requests_per_s": _per_s(recent.total(names.REQUESTS), window_s),
            "output_tokens_per_s": _per_s(recent.total(names.GENERATED_TOKENS), window_s),
            "in_flight": int(status["router"]["in_flight"]),
            "waiting": int(status["admission"]["waiting"]),
            "figures": seen["figures"],
            "pools": seen["pools"],
            "workers": workers,
        }


def show(found: Record, console: Console) -> None:
    """Print one document."""
    console.print(drawn(found))


def as_text(found: Record) -> str:
    """Return one document as lines of text, and an empty one."""
    console = rich_output.console()
    with console.capture() as captured:
        show(found, console)
    return captured.get()


def drawn(found: Record) -> Group:
    """Return one document as a picture for the terminal."""
    rates = f"{_rate(found['requests_per_s'])} requests/s, {_rate(found['output_tokens_per_s'])} tokens/s"
    busy = f"{found['in_flight']} in flight, {found['waiting']} waiting"
    of = "since the router started" if found["window_s"] is None else f"of the last {found['window_s']:.1f} s"
    return Group(
        Text(f"{found['cluster']}: {found['health']}; {busy}; {rates}"),
        Text(f"{status_view.figures(found['figures'])} ({of})"),
        Text(),
        status_view.pools(found),
        Text(),
        _workers(found["workers"]),
    )


def _workers(workers: Sequence[Record]) -> Table:
    figures = ("RUNNING", "QUEUED", "QUEUED TOKENS", "KV", "PREFILL, tok/s", "STEP")
    table = rich_output.table("WORKER", "ROLE", "STATE", *figures, right=figures, fixed=("WORKER", "ROLE"))
    for one in workers:
        table.add_row(
            *(one["worker"], one["role"] or "–", one["state"]),
            *(str(one[key]) for key in ("running_requests", "queued_requests", "queued_tokens")),
            f"{_bar(one['kv_share'])} {share(one['kv_share']):>4}",
            f"{one['prefill_tokens_per_s']:.0f}" if one["prefill_tokens_per_s"] else "–",
            ms(one["decode_step_s"]) if one["decode_step_s"] else "–",
        )
    return table


def _worker(worker: Record) -> dict[str, Any]:
    return {
        "worker": worker["worker"],
        "role": worker.get("role", ""),
        "state": status_view.state(worker),
        **{key: int(worker.get(key) or 0) for key in ("running_requests", "queued_requests", "queued_tokens")},
        "kv_share": kv_share([worker]),
        **{key: float(worker.get(key) or 0.0) for key in ("prefill_tokens_per_s", "decode_step_s")},
    }


def _per_s(count: float, window_s: float | None) -> float | None:
    return round(count / window_s, 3) if window_s else None


def _rate(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def _bar(value: float | None, width: int = 10) -> str:
    filled = 0 if value is None else round(value * width)
    return "█" * filled + "░" * (width - filled)
