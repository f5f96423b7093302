"""`clusterctl net`: how fast every transport is between every two hosts, and which links carry KV."""

from __future__ import annotations

import json
import sys

from rich.console import Console

from tandem.clusterctl import net_view
from tandem.clusterctl.admin_client import AdminClient
from tandem.clusterctl.flags import AsJson, Endpoint, KeyFile, Name, StateDirFlag
from tandem.core.config import DEFAULT_CLUSTER

_FILE_WIDTH = 200


def net(
    name: Name = DEFAULT_CLUSTER,
    state_dir: StateDirFlag = "",
    endpoint: Endpoint = "",
    admin_key_file: KeyFile = "",
    as_json: AsJson = False,
) -> None:
    """Show how fast KV travels: a matrix of hosts and transports as measured, and the links in use."""
    with AdminClient.find(endpoint=endpoint, admin_key_file=admin_key_file, name=name, state_dir=state_dir) as admin:
        found = admin.net()
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        net_view.show(found, Console(width=None if sys.stdout.isatty() else _FILE_WIDTH))
