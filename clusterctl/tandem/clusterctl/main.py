"""The `clusterctl` program: finds the command, and turns every error into one line and an exit code (exit_codes.py)."""

from __future__ import annotations

import os
import sys
from typing import Any

import typer
import typer.main

from tandem.clusterctl.commands import COMPLETE_VAR, Program, examples
from tandem.clusterctl.exit_codes import Exit, code_of
from tandem.clusterctl.output import note
from tandem.clusterctl.suggestions import usage_line
from tandem.core.errors import TandemError

app = typer.Typer(
    cls=Program,
    help="Run and steer Tandem clusters.",
    epilog=examples("up --prefill 1 --decode 1", "status", "COMMAND --help"),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


@app.callback()
def clusterctl() -> None:
    """Run and steer Tandem clusters."""


def main() -> None:
    """Entry point of the `clusterctl` program."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command and return the exit code. Every error is a line on stderr."""
    program: Any = typer.main.get_command(app)
    if COMPLETE_VAR in os.environ:  # a shell asks for completion
        from typer._completion_classes import completion_init

        completion_init()
    stdout = sys.stdout
    try:
        code = int(program.main(arguments, prog_name="clusterctl", standalone_mode=False) or Exit.OK)
        sys.stdout.flush()
        return code
    except TandemError as error:
        note(f"clusterctl: {error.message}")
        return code_of(error)
    except BrokenPipeError:
        return _fall_silent()
    except SystemExit:
        if sys.stdout is not stdout:  # typer's way to report the same
            sys.stdout = stdout
            return _fall_silent()
        raise
    except OSError as error:
        what = f"cannot use {error.filename}: " if error.filename else ""
        note(f"clusterctl: {what}{error.strerror or error}.")
        return Exit.FAILED
    except typer.Abort:
        return Exit.INTERRUPTED
    except _USAGE_ERROR as error:
        if not str(getattr(error, "message", "")).startswith("Usage:"):
            note(f"clusterctl: {usage_line(error)}")
        else:  # no command at all: this is the help
            note(error.format_message())
        return Exit.USAGE


def _fall_silent() -> Exit:
    """Silence the output: its reader has closed it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return Exit.OK


_USAGE_ERROR: Any = typer.BadParameter.__mro__[1]
"""typer keeps its base class to itself."""


if __name__ == "__main__":
    main()
