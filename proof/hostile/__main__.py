"""Hostile clients send what is just below each bound, and honest streams of another tenant lose nothing.

A simulated cluster of a prefill and a decode worker serves honest streams alone (calm), then beside hostile clients of
another tenant and of none, slice by slice with a seed each. Broken: a stream that is lost or wrong, gaps between tokens
with a p99 of more than 1.5 times that of the calm before, a worker link that ended, an answer of status 500, and memory
of the router that has not come back at the end. Finished slices are kept in --out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.report import ROOT
from proof.hostile.honest import Seen, Streams
from proof.record import Record, arguments_of, say_how_to_repeat
from tools.running_cluster import Cluster, is_free, running
from tools.waiting import wait_for

MODEL = ROOT / "models" / "tandem-tiny"
STEP_S = 0.02
"""Step time of the simulated engine: the gap between two tokens when nothing disturbs."""
CONFIG = f"""
[model]
path = "{MODEL}"
[pools]
prefill = 1
decode = 1
[worker]
engine = "sim"
[worker.sim]
decode_step_s = {STEP_S}
"""
SLOWER = 1.5
MEMORY_MIB = 96
"""Allowed growth of the router's memory, once all is quiet: freed memory that malloc keeps."""
CALM_S = 15.0
QUIET_S = 90.0


def main() -> int:
    arguments = _arguments()
    about = {"first_seed": arguments.seed, "every_s": arguments.every_s, "clients": arguments.clients}
    record = Record(arguments.out, "hostile", about, is_fresh=arguments.fresh)
    slices: list[dict[str, Any]] = record.content.setdefault("slices", [])
    while slices and slices[-1]["broken"]:
        slices.pop()
    if _seconds(slices) < arguments.seconds:
        _run(record, slices, arguments)
    left_s = max(0.0, arguments.seconds - _seconds(slices))
    broken = sum(bool(one["broken"]) for one in slices)
    return record.verdict(len(slices), left=math.ceil(left_s / arguments.slice), broken=broken)


def _run(record: Record, slices: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Slices from where the record ends, up to the first broken promise."""
    until_s = time.monotonic() + arguments.budget_s
    with running(config=CONFIG) as cluster:
        honest, hostile = _key(cluster, "honest"), _key(cluster, "hostile")
        streams = Streams(cluster.api, cluster.context["grpc"], honest, arguments.seed)
        asyncio.run(streams.run(3.0))  # the first answers, and what is imported at the first of a kind
        before_mib = _router_mib(cluster)
        while (rest_s := arguments.seconds - _seconds(slices)) > 0 and time.monotonic() < until_s:
            seed = arguments.seed + len(slices)
            done = _slice(cluster, streams, hostile, seed, min(rest_s, arguments.slice), arguments, before_mib)
            slices.append(done)
            record.save()
            if done["broken"]:
                say_how_to_repeat("hostile", f"--seed {seed} --seconds {done['seconds']:g}")
                break


def _slice(
    cluster: Cluster, streams: Streams, hostile: str, seed: int, seconds: float, arguments: argparse.Namespace,
    before_mib: float,
) -> dict[str, Any]:  # fmt: skip
    """Return the measurements, and every promise that they break."""
    calm = asyncio.run(streams.run(min(CALM_S, seconds)))
    clients = [
        _start(cluster, hostile, 1000 * seed + number, seconds, arguments) for number in range(arguments.clients)
    ]
    try:
        seen = asyncio.run(streams.run(seconds))
        outcomes = _outcomes(clients)
    finally:
        for client in clients:
            client.kill()
            client.wait()
    wait_for(lambda: is_free(cluster, 2), QUIET_S, "nothing is left of any request")
    after_mib, links = _router_mib(cluster), _lost_links(cluster)
    found = {
        "seed": seed, "seconds": seconds, "answers": seen.answers, "calm_p99_ms": round(1e3 * calm.p99_s(), 1),
        "p99_ms": round(1e3 * seen.p99_s(), 1), "longest_ms": round(1e3 * max(seen.gaps_s, default=0.0), 1),
        "router_mib": [round(before_mib), round(after_mib)], "lost_links": links, "outcomes": outcomes,
    }  # fmt: skip
    found["broken"] = _broken(calm, seen, found)
    print(json.dumps(found), flush=True)
    return found


def _broken(calm: Seen, seen: Seen, found: dict[str, Any]) -> list[str]:
    """Return the broken promises."""
    before_mib, after_mib = found["router_mib"]
    failed = [name for name in found["outcomes"] if name.rpartition(" ")[2] == "500"]
    complaints = [f"lost: {why}" for why in (*calm.lost, *seen.lost)[:5]]
    complaints += [f"a failure of the server's own: {name}" for name in failed]
    if seen.p99_s() > SLOWER * calm.p99_s():
        complaints.append(
            f"p99 between tokens is {found['p99_ms']} ms, {found['calm_p99_ms']} ms without hostile clients"
        )
    if found["lost_links"]:
        complaints.append(f"{found['lost_links']} links to workers ended")
    if after_mib > before_mib + MEMORY_MIB:
        complaints.append(f"the router has {after_mib} MiB, {before_mib} MiB at the beginning")
    return complaints


def _start(
    cluster: Cluster, key: str, seed: int, seconds: float, arguments: argparse.Namespace
) -> subprocess.Popen[str]:
    command = [
        sys.executable, "-m", "proof.hostile.attacks", "--api", cluster.api, "--grpc", cluster.context["grpc"],
        "--seed", str(seed), "--seconds", str(seconds), "--every-s", str(arguments.every_s),
    ]  # fmt: skip
    client = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert client.stdin is not None
    client.stdin.write(f"{key}\n")
    client.stdin.flush()
    return client


def _outcomes(clients: list[subprocess.Popen[str]]) -> dict[str, int]:
    """Attack and answer → how often, of all clients together."""
    total: dict[str, int] = {}
    for client in clients:
        out, _ = client.communicate(timeout=QUIET_S)
        if client.returncode:
            raise SystemExit(f"a hostile client failed with status {client.returncode}")
        for name, count in json.loads(out).items():
            total[name] = total.get(name, 0) + count
    return dict(sorted(total.items()))


def _key(cluster: Cluster, tenant: str) -> str:
    return str(cluster.admin("/admin/v1/keys", {"tenant": tenant, "scopes": ["infer"]})["key"])


def _router_mib(cluster: Cluster) -> float:
    """Resident memory of the router."""
    status = Path(f"/proc/{cluster.status()['router']['pid']}/status").read_text()
    return float(status.partition("VmRSS:")[2].split()[0]) / 1024


def _lost_links(cluster: Cluster) -> int:
    """How often the router has written that a worker was lost."""
    return sum(file.read_text(errors="replace").count("worker lost") for file in cluster.folder.rglob("router*.log"))


def _seconds(slices: list[dict[str, Any]]) -> float:
    return math.fsum(one["seconds"] for one in slices)


def _arguments() -> argparse.Namespace:
    parser = arguments_of("hostile", __doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the first slice")
    parser.add_argument("--seconds", type=float, default=600.0, help="of all slices together")
    parser.add_argument("--slice", type=float, default=60.0, help="seconds of one")
    parser.add_argument("--clients", type=int, default=2, help="hostile processes at a time")
    parser.add_argument("--every-s", type=float, default=0.2, help="how often one of them begins an attack")
    parser.add_argument(
        "--budget-s",
        type=float,
        default=math.inf,
        help="begin no slice after so many seconds; exit status 75 if any is left",
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
