"""`clusterctl net`: how fast every transport is between every two hosts, and which links carry KV."""

from __future__ import annotations

from tandem.clusterctl import net_view, page
from tandem.clusterctl.flags import AsJson, Where, on_cluster


@on_cluster
def net(where: Where, as_json: AsJson = False) -> None:
    """Show how fast KV travels: a matrix of hosts and transports as measured, and the links in use."""
    with where.client() as admin:
        page.show(admin.net(), net_view.show, as_json=as_json)
