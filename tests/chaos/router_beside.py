"""More routers for a running cluster: processes with its Redis, secret and settings, and ports of their own."""

import contextlib
import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator

from tandem.core import config_loader
from tandem.core.config import RouterConfig, RouterSection
from tools.running_cluster import START_TIMEOUT_S, STOP_TIMEOUT_S, Cluster
from tools.waiting import wait_for


@contextlib.contextmanager
def router_beside(cluster: Cluster, name: str) -> Iterator[Cluster]:
    """The same cluster through another router, which has to stop in order unless it was killed."""
    (path,) = cluster.folder.glob("*/config/router-0.json")
    config = config_loader.load(path, RouterConfig)
    ready = cluster.folder / f"{name}.ready.json"
    ready.unlink(missing_ok=True)
    own = dataclasses.replace(config, router_id=name, ready_file=str(ready), settings=_any_ports(config))
    file = cluster.folder / f"{name}.json"
    file.touch(mode=0o600)
    file.write_bytes(config_loader.dump(own))
    with (cluster.folder / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tandem.router", "--config", str(file)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        wait_for(lambda: ready.is_file() or process.poll() is not None, START_TIMEOUT_S, f"{name} listens")
        assert process.poll() is None, (cluster.folder / f"{name}.log").read_text(errors="replace")[-3000:]
        found = json.loads(ready.read_text())
        context = {"api": found["http"], "admin": found["admin"], "admin_key_file": own.admin_key_file}
        beside = Cluster(process, cluster.folder, context)
        wait_for(lambda: beside.get("/readyz")[0] == 200, START_TIMEOUT_S, f"{name} is ready")
        yield beside
        if process.poll() is None:
            process.terminate()
            assert process.wait(STOP_TIMEOUT_S) == 0
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def _any_ports(config: RouterConfig) -> RouterSection:
    return dataclasses.replace(config.settings, port=0, grpc_port=0, admin_port=0)
