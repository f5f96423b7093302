"""Real worker processes killed and stopped at random while clients stream: every answer is the undisturbed one.

Three prefill and three decode workers with the simulated engine; at most one of each role is struck at a time: spares
are left. Rounds follow one another; finished ones are kept in --out, so a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.chaos import survivors
from tests.chaos.survivors import Client, check, stopped, wait_whole
from tests.e2e.cluster import Cluster, running, wait_for

ROOT = Path(__file__).parents[2]
WORKERS = {"prefill": 3, "decode": 3}
HOWS = ("kill host", "kill rank", "stop")
CAUSES = ("lost", "transfer", "refused", "broken", "stalled")
CONFIG = """
[pools]
prefill = 3
decode = 3
[worker]
engine = "sim"
threads = 1
[worker.sim]
prefill_tokens_per_s = 3000.0
decode_step_s = 0.015
[router]
disaggregation = "always"
worker_wait_s = 30.0
"""


@dataclass
class Outcome:
    """One round: requests, all of them answered right; who was struck; attempts after failures by cause."""

    requests: int = 0
    strikes: dict[str, int] = field(default_factory=dict)
    reattempts: dict[str, float] = field(default_factory=dict)
    took_s: float = 0.0


def run_round(cluster: Cluster, seed: int) -> Outcome:
    """Raises AssertionError at the first answer that is not the undisturbed one."""
    rng = random.Random(seed)
    outcome, began_s = Outcome(), time.monotonic()
    bodies = {}
    for salt in rng.sample(range(100_000), rng.randint(1, 3)):
        for kind, body in survivors.asks(rng.randint(10, 80), rng.randint(20, 900), salt).items():
            bodies[f"{kind} {salt}"] = body
    wait_whole(cluster, sum(WORKERS.values()))
    right = survivors.undisturbed(cluster, bodies)
    before = _reattempts(cluster)
    pids = cluster.pids()
    clients = {kind: Client(cluster, body) for kind, body in bodies.items()}
    outcome.requests = len(clients)
    for role in rng.sample(sorted(WORKERS), rng.randint(1, 2)):
        worker, how = f"{role}-{rng.randrange(WORKERS[role])}", rng.choice(HOWS)
        progress = rng.randint(0, 15) * len(clients)
        wait_for(lambda due=progress: _progress(clients) >= due, 60, "the round goes on")  # type: ignore[misc]
        outcome.strikes[f"{role} {how}"] = outcome.strikes.get(f"{role} {how}", 0) + 1
        if how == "stop":
            with stopped(pids[worker]):
                check(clients, right)
        else:
            os.kill(pids[worker][how == "kill rank"], signal.SIGKILL)
    check(clients, right)
    after = _reattempts(cluster)
    outcome.reattempts = {cause: after[cause] - before[cause] for cause in CAUSES}
    outcome.took_s = round(time.monotonic() - began_s, 2)
    return outcome


def _progress(clients: dict[str, Client]) -> int:
    """Events so far; an answer that ended counts as one that went on for ever."""
    return sum(client.events if client.is_alive() else 1000 for client in clients.values())


def _reattempts(cluster: Cluster) -> dict[str, float]:
    return {cause: cluster.metric("tandem_reattempts_total", cause=cause) for cause in CAUSES}


def main() -> int:
    parser = argparse.ArgumentParser(prog="proof.survival", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "proof" / "results" / "survival.json")
    parser.add_argument("--seed", type=int, default=4000, help="the first seed")
    parser.add_argument("--rounds", type=int, default=60, help="how many")
    arguments = parser.parse_args()
    record = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    if record.get("first_seed") != arguments.seed:
        record = {"name": "survival", "first_seed": arguments.seed, "rounds": {}}
    todo = [s for s in range(arguments.seed, arguments.seed + arguments.rounds) if str(s) not in record["rounds"]]
    with tempfile.TemporaryDirectory(prefix="td-") as folder:
        config = Path(folder) / "cluster.toml"
        config.write_text(CONFIG)
        with running("--config", str(config)) as cluster:
            for seed in todo:
                outcome = run_round(cluster, seed)
                record["rounds"][str(seed)] = asdict(outcome)
                arguments.out.write_text(json.dumps(record, indent=1) + "\n")
                print(f"seed {seed}: {outcome}", flush=True)
    done = record["rounds"].values()
    print(f"{len(done):7} rounds, {sum(r['requests'] for r in done)} requests, every answer the undisturbed one")
    for cause in CAUSES:
        print(f"{sum(r['reattempts'][cause] for r in done):7.0f} attempts after a failure: {cause}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
