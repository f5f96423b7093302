"""`clusterctl join`: give this machine to a cluster on Ray, for as long as the command runs."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.clusterctl.commands import command_app, examples
from tandem.clusterctl.confirm import DryRun
from tandem.clusterctl.exit_codes import Exit
from tandem.clusterctl.flags import flagged
from tandem.clusterctl.output import Output, Record, note
from tandem.core.errors import ConfigError, UnavailableError
from tandem.core.files import expand_user

if TYPE_CHECKING:
    from rich.console import Console

    from tandem.controlplane.ray.ray_start import NodeConfig

_REACH_S = 5.0

app = command_app()


@app.command(
    epilog=examples(
        "join 10.0.0.1:6380 --token-file ray.token --hardware h100", "join 10.0.0.1:6380 --gpus 0 --dry-run"
    )
)
@flagged
def join(
    look: DryRun,
    output: Output,
    address: Annotated[str, typer.Argument(help="The cluster's Ray head as HOST:PORT; `up --launcher ray` prints it.")],
    token_file: Annotated[Path | None, typer.Option(help="A copy of the head's token file, of mode 0600.")] = None,
    hardware: Annotated[str, typer.Option(help="Class of this machine, which pools name with `hardware`.")] = "any",
    cpus: Annotated[int, typer.Option(help="CPUs that workers here share; 0 = its cores.", min=0)] = 0,
    gpus: Annotated[int, typer.Option(help="GPUs for workers; -1 = all that are here.", min=-1)] = -1,
    host: Annotated[str, typer.Option(help="Address of this machine that the others reach.")] = "",
) -> None:
    """Add this machine to a cluster on Ray, until Ctrl-C.

    Workers may be placed on its CPUs and GPUs. The cluster runs with `up --launcher ray`. With --dry-run, see whether
    a cluster answers there and show what would be given.
    """
    from tandem.controlplane.environment import Environment
    from tandem.controlplane.gpu_free_check import count
    from tandem.controlplane.ray.launcher import check_installed
    from tandem.controlplane.ray.ray_start import NodeConfig, RayNodeProcess, told_by_signals

    check_installed()
    _check(address, token_file)
    environment = Environment.read()
    config = NodeConfig(
        address=address,
        host=host,
        cpus=cpus or environment.cores,
        gpus=count() if gpus < 0 else gpus,
        hardware=hardware,
        token_file=str(expand_user(token_file).absolute()) if token_file else "",
        state_root=str(environment.state_root),
    )
    given = f"{config.cpus} CPU{f', {config.gpus} GPU' if config.gpus else ''} of class {hardware}"
    if look.dry_run:
        _show_would(config, given, output)
        return
    if output.is_document:
        raise ConfigError(f"--output is {output.format}", why="only --dry-run prints a document", todo="Leave it out")
    _tell(f"joining {address}")
    node = RayNodeProcess(
        config,
        on_start=lambda ours: print(f"joined {address} as {ours or host}: {given}; Ctrl-C leaves", flush=True),
        on_trouble=_tell,
    )
    with told_by_signals(node):
        if not node.run():
            raise typer.Exit(Exit.FAILED)
    _tell("left; nothing of it runs here any more")


def _show_would(config: NodeConfig, given: str, output: Output) -> None:
    def view(found: Record, console: Console) -> None:
        from tandem.clusterctl.rich_output import say

        say(console, f"this machine would join {found['address']}: {given}")
        say(console, "nothing was started (--dry-run)")

    found = {
        "is_dry_run": True,
        "address": config.address,
        "host": config.host or None,
        "cpus": config.cpus,
        "gpus": config.gpus,
        "hardware": config.hardware,
        "token_file": config.token_file or None,
    }
    output.show("Join", found, view)


def _check(address: str, token_file: Path | None) -> None:
    """Fail early for mistakes that would otherwise cause a long wait and an unclear error."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"{address!r} is not an address", todo="Use HOST:PORT, such as 10.0.0.1:6380")
    if token_file is not None and not expand_user(token_file).is_file():
        raise ConfigError(f"there is no token file {token_file}", todo="Copy it from the machine of the head")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()
    except OSError as error:
        raise UnavailableError(
            f"no cluster answers at {address}",
            why=error.strerror or str(error),
            todo="Check the address, and that the cluster runs with --launcher ray",
        ) from error


def _tell(text: str) -> None:
    note(f"clusterctl: {text}")
