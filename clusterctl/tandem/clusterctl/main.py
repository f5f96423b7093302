"""`clusterctl up | down | status | net | kv | route | key | slo`. Exit codes: 0 done, 1 failed, 2 wrong usage.

2 is also for what did not start. `kv audit` has its own (kv.py).
"""

from __future__ import annotations

import os
import sys
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from tandem.clusterctl import key, kv, net, page, route, slo, status_view
from tandem.clusterctl.flags import AsJson, Where, on_cluster, taking
from tandem.clusterctl.up_flags import UpFlags
from tandem.core.errors import ConfigError, StartupError, TandemError, UnavailableError

_STARTED_S = time.monotonic()
EXIT_FAILED = 1
EXIT_STARTUP = 2

app = typer.Typer(
    help="Run and steer Tandem clusters.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

app.add_typer(kv.app, name="kv")
app.add_typer(route.app, name="route")
app.add_typer(key.app, name="key")
app.add_typer(slo.app, name="slo")
app.command()(net.net)


def up(flags: UpFlags) -> None:
    """Start a cluster on this machine and keep it running in the foreground; Ctrl-C stops it."""
    from tandem.cluster.environment import Environment
    from tandem.cluster.up import UpOptions
    from tandem.cluster.up import up as run

    if not flags.timeout > 0:
        raise ConfigError(f"--timeout is {flags.timeout:g}", todo="Use more than 0 seconds")
    try:
        run(flags.to_config(), Environment.read(), _TerminalProgress(), UpOptions(ready_timeout_s=flags.timeout))
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_FAILED) from None


app.command()(taking(UpFlags, up))


@app.command()
@on_cluster
def down(
    where: Where,
    timeout: Annotated[float, typer.Option(help="Seconds to wait until everything is gone.")] = 60.0,
) -> None:
    """Stop a cluster and wait until it is gone."""
    with where.client() as admin:
        admin.down()
        if not admin.wait_gone(timeout):
            raise UnavailableError(
                f"the cluster at {admin.endpoint} still runs after {timeout:g} s", todo="Look into its logs"
            )
    print("stopped")


@app.command()
@on_cluster
def status(where: Where, as_json: AsJson = False) -> None:
    """Show what runs."""
    with where.client() as admin:
        page.show(admin.status(), status_view.show, as_json=as_json)


class _TerminalProgress:
    """A line for every step, with the seconds since the start; lines without a part are there to be copied."""

    def __init__(self) -> None:
        self._console = _Terminal(highlight=False, soft_wrap=True)

    def say(self, part: str, text: str) -> None:
        line = Text(text)
        if part:
            stamp = Text(f"{time.monotonic() - _STARTED_S:7.2f} s  ", style="dim")
            line = stamp + Text(f"{part:<11} ", style="bold") + line
        try:
            self._console.print(line)
        except OSError:  # the terminal is gone
            self._console.quiet = True


class _Terminal(Console):
    """Falls silent when nobody reads any more, instead of ending the program as rich does."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main() -> None:
    """Entry point of the `clusterctl` program."""
    try:
        app()
    except TandemError as error:
        print(f"clusterctl: {error.message}", file=sys.stderr)
        sys.exit(EXIT_STARTUP if isinstance(error, StartupError) else EXIT_FAILED)
    except OSError as error:
        what = f"cannot use {error.filename}: " if error.filename else ""
        print(f"clusterctl: {what}{error.strerror or error}.", file=sys.stderr)
        sys.exit(EXIT_FAILED)


if __name__ == "__main__":
    main()
