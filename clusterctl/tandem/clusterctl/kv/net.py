"""`clusterctl net`: the speed of every transport between every two hosts, and the links that carry KV."""

from __future__ import annotations

from tandem.clusterctl.commands import command_app, examples
from tandem.clusterctl.flags import Where, flagged
from tandem.clusterctl.kv import net_view
from tandem.clusterctl.output import Output

app = command_app()


@app.command(epilog=examples("net", "net -o json"))
@flagged
def net(where: Where, output: Output) -> None:
    """Show how fast KV travels: a matrix of hosts and transports as measured, and the links in use."""
    with where.client() as admin:
        output.show("Net", admin.net(), net_view.show)
