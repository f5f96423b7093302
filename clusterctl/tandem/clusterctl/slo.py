"""`clusterctl slo list | set`: the SLO classes of a cluster, through its admin port."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from tandem.clusterctl.admin_client import AdminClient
from tandem.clusterctl.flags import AsJson, Endpoint, KeyFile, Name, StateDirFlag
from tandem.core.config import DEFAULT_CLUSTER

app = typer.Typer(help="What requests are promised.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def slo() -> None:
    """What requests are promised."""


@app.command("list")
def list_classes(
    name: Name = DEFAULT_CLUSTER,
    state_dir: StateDirFlag = "",
    endpoint: Endpoint = "",
    admin_key_file: KeyFile = "",
    as_json: AsJson = False,
) -> None:
    """Show the SLO classes in force."""
    with AdminClient.find(endpoint=endpoint, admin_key_file=admin_key_file, name=name, state_dir=state_dir) as admin:
        _show(admin.slo(), as_json=as_json)


@app.command("set")
def set_class(
    wanted: Annotated[str, typer.Argument(metavar="CLASS", help="Its name; one that is not there is added.")],
    ttft: Annotated[float | None, typer.Option(help="Seconds to the first token; 0 = not promised.")] = None,
    itl: Annotated[float | None, typer.Option(help="Seconds between two tokens; 0 = not promised.")] = None,
    name: Name = DEFAULT_CLUSTER,
    state_dir: StateDirFlag = "",
    endpoint: Endpoint = "",
    admin_key_file: KeyFile = "",
    as_json: AsJson = False,
) -> None:
    """Change what a class promises while requests run; what is not given stays. After a restart the configured classes
    are back."""
    given = {key: seconds for key, seconds in (("ttft_s", ttft), ("itl_s", itl)) if seconds is not None}
    with AdminClient.find(endpoint=endpoint, admin_key_file=admin_key_file, name=name, state_dir=state_dir) as admin:
        known = next((row for row in admin.slo()["classes"] if row["slo"] == wanted), {"slo": wanted})
        _show(admin.set_slo({**known, **given}), as_json=as_json)


def _show(found: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for row in found["classes"]:
        promises = [f"{label} {row[key]:g} s" for key, label in (("ttft_s", "TTFT"), ("itl_s", "ITL")) if row[key]]
        is_default = " (of requests that name none)" if row["slo"] == found["default_slo"] else ""
        print(f"{row['slo']}{is_default}: {', '.join(promises) or 'nothing promised'}")
    if not found["classes"]:
        print("there are no SLO classes")
