"""Random `scale`, `flip`, `drain`, `uncordon` and `restart` commands against a cluster of real processes under load.

Each round starts a cluster with the simulated engine, keeps clients asking, and gives one command after another. Every
command has to end with 0, no answer may differ by a token from the undisturbed one, whoever left has no process any
more, and at the end of a round the ledgers balance. Rounds that are done stay in --out: a run that was stopped, or ran
out of --seconds, goes on.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from proof.record import Record, arguments_of, said_how_to_repeat
from tests.chaos.survivors import asks
from tests.e2e.under_load import SETTINGS, ConstantLoad, changed, wait_balanced, wait_ended
from tools.running_cluster import Cluster, running

MOST_OF_A_ROLE = 3
ANSWERS_AFTER = 3
"""Requests that are answered before the next command."""


def play_round(seed: int, number: int, commands: int) -> list[dict[str, Any]]:
    """What was commanded and what came of it. Raises AssertionError at the first broken promise."""
    rng = random.Random(f"{seed} {number}")
    done: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="td-") as folder:
        path = Path(folder) / "cluster.toml"
        path.write_text(SETTINGS)
        with running("--config", str(path)) as cluster:
            with ConstantLoad(cluster, asks(20, 160, salt=seed + number)) as load:
                for _ in range(commands):
                    done.append(_command(cluster, _choose(cluster, rng), load))
            wait_balanced(cluster, 2)
    return done


def _command(cluster: Cluster, arguments: Sequence[str], load: ConstantLoad) -> dict[str, Any]:
    before, began_s, answered = cluster.pids(), time.monotonic(), load.answers
    changed(cluster, *arguments)
    took_s = round(time.monotonic() - began_s, 1)
    during = load.answers - answered
    load.wait_more(ANSWERS_AFTER)
    wait_ended(before, cluster.pids())
    assert load.failures == [], load.failures[:3]
    return {"command": " ".join(arguments), "took_s": took_s, "answers": during}


def _choose(cluster: Cluster, rng: random.Random) -> list[str]:
    """A command that may be given to the cluster as it is."""
    members = cluster.admin("/admin/v1/desired")["desired"]["members"]
    able = [member for member in members if not member["is_cordoned"]]
    count = Counter(member["role"] for member in able)
    spare = [member["worker_id"] for member in able if count[member["role"]] > 1]
    drained = [member["worker_id"] for member in members if member["is_cordoned"]]
    verbs = ["scale", "scale", *(["flip", "restart", "drain"] if spare else []), *(["uncordon"] * 2 if drained else [])]
    verb = rng.choice(verbs)
    if verb == "scale":
        wanted = [str(rng.randint(1, MOST_OF_A_ROLE)) for _ in range(2)]
        if drained and "1" in wanted:
            wanted = ["2", "2"]  # else only drained ones might stay
        flip = rng.choice(("--flip", "--no-flip"))
        return ["scale", "--prefill", wanted[0], "--decode", wanted[1], flip]
    if verb == "uncordon":
        return ["uncordon", rng.choice(drained)]
    worker = rng.choice(spare)
    role = next(member["role"] for member in able if member["worker_id"] == worker)
    return ["flip", worker, "--to", "decode" if role == "prefill" else "prefill"] if verb == "flip" else [verb, worker]


def main() -> int:
    parser = arguments_of("elastic", __doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--commands", type=int, default=10, help="of a round")
    parser.add_argument("--seconds", type=float, default=900.0, help="after which no round is begun")
    arguments = parser.parse_args()
    about = {"seed": arguments.seed, "commands": arguments.commands}
    record = Record(arguments.out, "elastic", about, is_fresh=arguments.fresh)
    rounds: dict[str, list[dict[str, Any]]] = record.content.setdefault("rounds", {})
    ends_s = time.monotonic() + arguments.seconds
    for number in range(arguments.rounds):
        if str(number) in rounds or time.monotonic() > ends_s:
            continue
        options = f"--seed {arguments.seed} --rounds {number + 1} --commands {arguments.commands}"
        with said_how_to_repeat("elastic", options):
            rounds[str(number)] = play_round(arguments.seed, number, arguments.commands)
        record.save()
        print(f"round {number}: {len(rounds[str(number)])} commands", flush=True)
    done = [rounds[str(number)] for number in range(arguments.rounds) if str(number) in rounds]
    _report([row for rows in done for row in rows])
    return record.verdict(len(done), left=arguments.rounds - len(done))


def _report(rows: Sequence[dict[str, Any]]) -> None:
    for verb, count in sorted(Counter(row["command"].split()[0] for row in rows).items()):
        times = sorted(row["took_s"] for row in rows if row["command"].startswith(verb))
        print(f"{count:7} times {verb}: {times[len(times) // 2]:.1f} s at the median, {times[-1]:.1f} s at most")
    print(
        f"{sum(row['answers'] for row in rows):7} requests answered during commands, every answer the undisturbed one"
    )


if __name__ == "__main__":
    sys.exit(main())
