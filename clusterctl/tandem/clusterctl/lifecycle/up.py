"""`clusterctl up`: a cluster in the foreground, with a line for every step of its start."""

from __future__ import annotations

import os
import sys
import time

import typer
from rich.console import Console
from rich.text import Text

from tandem.clusterctl.commands import command_app, examples
from tandem.clusterctl.confirm import DryRun
from tandem.clusterctl.exit_codes import Exit
from tandem.clusterctl.flags import check_positive, flagged
from tandem.clusterctl.lifecycle.up_flags import UpFlags
from tandem.clusterctl.output import Output
from tandem.core.config import ClusterConfig
from tandem.core.errors import ConfigError
from tandem.core.timeout_scale import MOST, PATIENCE, PATIENCE_VARIABLE

_STARTED_S = time.monotonic()

app = command_app()


@app.command(
    epilog=examples(
        "up --prefill 1 --decode 2",
        "up --model Qwen/Qwen3-0.6B --mixed 2 --port 9000",
        "up --config cluster.toml --dry-run",
    )
)
@flagged
def up(flags: UpFlags, look: DryRun, output: Output) -> None:
    """Start a cluster on this machine and keep it running in the foreground; Ctrl-C stops it.

    Started again with the same settings it goes on with what was changed meanwhile; after `down` as configured. With
    --dry-run, check everything, show what is configured, and start, write and fetch nothing.
    """
    config = flags.to_config()
    _take_patience(config.patience)
    from tandem.controlplane.environment import Environment
    from tandem.controlplane.up import UpOptions
    from tandem.controlplane.up import up as run

    check_positive("--timeout", flags.timeout, "seconds")
    if look.dry_run:
        _preview(config, output, fetches=flags.fetch)
        return
    if output.is_document:
        raise ConfigError(f"--output is {output.format}", why="only --dry-run prints a document", todo="Leave it out")
    options = UpOptions(ready_timeout_s=flags.timeout, as_configured=flags.as_configured, fetches=flags.fetch)
    try:
        run(config, Environment.read(), _TerminalProgress(), options)
    except KeyboardInterrupt:
        raise typer.Exit(Exit.INTERRUPTED) from None


def _take_patience(patience: float) -> None:
    """Execute the program again if it was loaded with another patience than the one to use; 0 = none is given."""
    if patience in (0, PATIENCE) or not 1 <= patience <= MOST:  # a wrong value is reported with the other mistakes
        return
    os.environ[PATIENCE_VARIABLE] = f"{patience:g}"
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - the command that was given


def _preview(config: ClusterConfig, output: Output, *, fetches: bool) -> None:
    from tandem.clusterctl.lifecycle import start_progress
    from tandem.controlplane.environment import Environment
    from tandem.controlplane.up_preview import preview

    found = preview(config, Environment.read(), fetches=fetches)
    output.show("Start", start_progress.document(found), start_progress.show)


class _TerminalProgress:
    """Prints a line for every step, with the seconds since the start; lines without a part are there to be copied."""

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
    """A console that falls silent when its reader is gone, where rich would end the program."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
