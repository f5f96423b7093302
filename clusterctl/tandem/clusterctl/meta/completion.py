"""`clusterctl completion SHELL`: the script that a shell reads once; it then asks `clusterctl` itself."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from tandem.clusterctl.commands import COMPLETE_VAR, command_app, examples

app = command_app()


class ShellName(StrEnum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


@app.command(
    epilog=examples(
        "completion bash > ~/.local/share/bash-completion/completions/clusterctl",
        "completion zsh > ~/.zfunc/_clusterctl",
        "completion fish > ~/.config/fish/completions/clusterctl.fish",
    )
)
def completion(shell: Annotated[ShellName, typer.Argument(help="The shell.", metavar="SHELL")]) -> None:
    """Print the script with which a shell completes commands and flags."""
    from typer._completion_shared import get_completion_script

    print(get_completion_script(prog_name="clusterctl", complete_var=COMPLETE_VAR, shell=shell.value))
