"""Flags that every command on a running cluster has: which one, and how to reach it."""

from __future__ import annotations

from typing import Annotated

import typer

Name = Annotated[str, typer.Option(help="Which cluster, if several run here.")]
StateDirFlag = Annotated[str, typer.Option(help="Where clusters keep their state [env: TANDEM_STATE_DIR].")]
Endpoint = Annotated[str, typer.Option(help="Admin port of a cluster elsewhere, such as http://127.0.0.1:8002.")]
KeyFile = Annotated[str, typer.Option(help="File with the admin key.")]
AsJson = Annotated[bool, typer.Option("--json", help="Everything, as JSON.")]
