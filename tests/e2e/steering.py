"""Steering the workers of a running cluster by their names, and looking at them."""

import asyncio
from dataclasses import dataclass

from tandem.controlplane.worker_control import WorkerControlClient, WorkerLook
from tandem.core.ids import WorkerId
from tandem.core.secret import ClusterSecret
from tandem.core.state_enums import RoleName
from tests.e2e.under_load import changed
from tools.running_cluster import Cluster
from tools.waiting import wait_for


@dataclass(frozen=True, slots=True)
class Operator:
    """Steers the workers of a cluster by their names, as people do, and looks at them."""

    cluster: Cluster

    def look(self, name: str) -> WorkerLook:
        (row,) = [row for row in self.cluster.status()["workers"] if row["worker"] == name]
        (secret,) = self.cluster.folder.glob("*/secret")
        client = WorkerControlClient(ClusterSecret.load(secret), lambda _: str(row["address"]))
        return asyncio.run(client.look(WorkerId(name)))

    def is_drained(self, name: str) -> bool:
        return self.look(name).is_drained

    def flip(self, name: str, role: RoleName) -> WorkerLook:
        """Change the role; wait until the worker is ready for work in it and the router knows it."""
        before = self.look(name).flips
        changed(self.cluster, "flip", name, "--to", role.value)
        assert self.look(name).flips == before + 1

        def is_met() -> bool:
            rows = {row["worker"]: row for row in self.cluster.status()["workers"]}
            row = rows.get(name, {})
            return row.get("role") == role.value and bool(row["is_connected"]) and row["state"] == "ready"

        wait_for(is_met, 60, f"the router knows {name} as a {role} worker")
        return self.look(name)
