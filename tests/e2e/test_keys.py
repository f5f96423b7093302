"""API keys of a whole cluster, from the command line to the API, kept over a restart."""

import json
import subprocess
import urllib.error
import urllib.request
from typing import Any

from tools.running_cluster import Cluster, running
from tools.waiting import wait_for

SIM = ("--engine", "sim", "--mixed", "1")


def clusterctl(cluster: Cluster, *arguments: str) -> tuple[int, str, str]:
    return cluster.clusterctl("key", *arguments, by_endpoint=True)


def status_of(cluster: Cluster, key: str | None) -> int:
    body = json.dumps({"model": "tandem-tiny", "prompt": "Hi", "max_tokens": 2}).encode()
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(f"{cluster.api}/v1/completions", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_a_key_from_its_creation_to_its_end() -> None:
    with running(*SIM) as cluster:
        wait_for(
            lambda: "access without an API key from this machine" in cluster.output,
            what="it prints which requests are let in",
        )
        assert status_of(cluster, None) == 200
        assert "no key yet" in clusterctl(cluster, "list")[1]
        wish = ("--tenant", "acme", "--expires", "30d", "--label", "first one")
        assert clusterctl(cluster, "create", *wish)[0] == 2, "requests without a key would be refused: it asks"
        code, out, error = clusterctl(cluster, "create", *wish, "--yes")
        assert code == 0, error
        key = out.strip()
        assert "not shown again" in error
        assert (status_of(cluster, key), status_of(cluster, None)) == (200, 401)
        rows: list[dict[str, Any]] = json.loads(clusterctl(cluster, "list", "--json")[1])["keys"]
        assert [(row["tenant"], row["name"]) for row in rows] == [("acme", "first one")]
        assert rows[0]["expires_s"] - rows[0]["created_s"] == 30 * 86400
        page = clusterctl(cluster, "list")[1]
        assert rows[0]["id"] in page
        assert key not in page
        (pid,) = [int(cluster.status()["router"]["pid"])]
        subprocess.run(["kill", "-9", str(pid)], check=True)
        wait_for(lambda: _is_back(cluster, pid), what="the router is back")
        assert (status_of(cluster, key), status_of(cluster, None)) == (200, 401)
        assert clusterctl(cluster, "revoke", rows[0]["id"], "--yes") == (0, f"revoked {rows[0]['id']}\n", "")
        assert status_of(cluster, key) == 401
        assert clusterctl(cluster, "revoke", rows[0]["id"]) == (0, f"{rows[0]['id']} is revoked already\n", "")


def _is_back(cluster: Cluster, old_pid: int) -> bool:
    try:
        return int(cluster.status()["router"]["pid"]) != old_pid and cluster.get("/readyz")[0] == 200
    except OSError:
        return False
