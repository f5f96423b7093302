"""Random `scale`, `flip`, `drain`, `uncordon`, `restart` and `rollout` commands against real processes under load.

Each round starts a cluster with the simulated engine, keeps clients asking, and gives one command after another. Every
command has to end with 0, no answer may differ by a token from the undisturbed one, a worker that left has no process
any more, a flip takes less than a second without its drain and keeps the prefixes that the worker holds, a rollout that
is undone half way restores the revision before, and at the end of a round the ledgers balance. Rounds that are done
stay in --out: a run that was stopped, or ran out of --seconds, goes on.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from proof.record import Record, arguments_of, said_how_to_repeat
from tests.chaos.survivors import asks
from tests.e2e.steering import Operator
from tests.e2e.under_load import SETTINGS, ConstantLoad, changed, wait_balanced, wait_ended
from tools.running_cluster import Cluster, running
from tools.waiting import PATIENCE_S, wait_for

MOST_OF_A_ROLE = 3
FLIP_S = 1.0
"""Bound on a flip, without its drain."""
ANSWERS_AFTER = 3
"""Requests that are answered before the next command."""


def play_round(seed: int, number: int, commands: int, flip_s: float = FLIP_S) -> list[dict[str, Any]]:
    """Return the commands and their results. Raises AssertionError at the first broken promise. `flip_s`: the bound on
    a flip without its drain."""
    rng = random.Random(f"{seed} {number}")
    done: list[dict[str, Any]] = []
    with running(config=SETTINGS) as cluster:
        with ConstantLoad(cluster, asks(20, 160, salt=seed + number)) as load:
            for _ in range(commands):
                done.append(_command(cluster, _choose(cluster, rng), load))
                assert done[-1].get("flip_ms", 0.0) < 1000 * flip_s, done[-1]
        wait_balanced(cluster, 2)
    return done


def _command(cluster: Cluster, steps: Sequence[Sequence[str]], load: ConstantLoad) -> dict[str, Any]:
    """One command, or `rollout start` and, half way, `rollout undo`."""
    before, began_s, answered = cluster.pids(), time.monotonic(), load.answers
    flipped = steps[0][1] if steps[0][0] == "flip" else ""
    held = _held(cluster, flipped, load) if flipped else {}
    was = _revisions(cluster)
    for number, step in enumerate(steps):
        changed(cluster, *step)
        if number < len(steps) - 1:
            load.wait_more(1)
    took_s = round(time.monotonic() - began_s, 1)
    during = load.answers - answered
    load.wait_more(ANSWERS_AFTER)
    wait_ended(before, cluster.pids())
    assert load.failures == [], load.failures[:3]
    row = {"command": "; ".join(" ".join(step) for step in steps), "took_s": took_s, "answers": during}
    if steps[0][0] == "rollout":
        _check_revisions(cluster, was, is_undone=len(steps) > 1)
    return row | _flip_figures(cluster, flipped, held, load) if flipped else row


def _flip_figures(cluster: Cluster, worker: str, held: Mapping[str, int], load: ConstantLoad) -> dict[str, Any]:
    """Its time without its drain, and the tokens that it holds as another incarnation: all that it held."""
    look = Operator(cluster).look(worker)

    def still() -> bool:
        now = _held(cluster, worker, load)
        return all(now.get(kind, 0) >= tokens for kind, tokens in held.items())

    wait_for(still, PATIENCE_S, f"{worker} holds what it held: {held}")
    return {"flip_ms": round(1000 * look.last_flip_s, 1), "held_tokens": sum(held.values())}


def _held(cluster: Cluster, worker: str, load: ConstantLoad) -> dict[str, int]:
    """Leading tokens of each prompt that the router knows on the worker."""
    found = {}
    for kind, body in load.bodies.items():
        if "prompt" in body:
            said = cluster.admin("/admin/v1/route/explain", {"prompt": body["prompt"]})
            found[kind] = sum(row["held_tokens"] for row in said["workers"] if row["worker"] == worker)
    return {kind: tokens for kind, tokens in found.items() if tokens}


def _revisions(cluster: Cluster) -> set[str]:
    return {row["revision"] for row in cluster.status()["workers"] if row["is_registered"] and "role" in row}


def _check_revisions(cluster: Cluster, before: set[str], *, is_undone: bool) -> None:
    wait_for(lambda: len(_revisions(cluster)) == 1, PATIENCE_S, "all workers are of one revision")
    now = _revisions(cluster)
    assert (now == before) is is_undone, (before, now)


def _choose(cluster: Cluster, rng: random.Random) -> list[list[str]]:
    """Choose a command that the cluster allows as it is."""
    desired = cluster.admin("/admin/v1/desired")["desired"]
    members = desired["members"]
    able = [member for member in members if not member["is_cordoned"]]
    count = Counter(member["role"] for member in able)
    spare = [member["worker_id"] for member in able if count[member["role"]] > 1]
    drained = [member["worker_id"] for member in members if member["is_cordoned"]]
    verbs = ["scale", "scale", "rollout", *(["flip", "flip", "restart", "drain"] if spare else [])]
    verb = rng.choice([*verbs, *(["uncordon"] * 2 if drained else [])])
    if verb == "scale":
        wanted = [str(rng.randint(1, MOST_OF_A_ROLE)) for _ in range(2)]
        if drained and "1" in wanted:
            wanted = ["2", "2"]  # else only drained ones might stay
        flip = rng.choice(("--flip", "--no-flip"))
        return [["scale", "--prefill", wanted[0], "--decode", wanted[1], flip]]
    if verb == "rollout":
        return _rollout(desired, rng, is_roomy=min(count.values()) > 1)
    if verb == "uncordon":
        return [["uncordon", rng.choice(drained)]]
    worker = rng.choice(spare)
    role = next(member["role"] for member in able if member["worker_id"] == worker)
    return [
        ["flip", worker, "--to", "decode" if role == "prefill" else "prefill"] if verb == "flip" else [verb, worker]
    ]


def _rollout(desired: Mapping[str, Any], rng: random.Random, *, is_roomy: bool) -> list[list[str]]:
    """Roll out another number of sequences, undone half way or not; or go back to the revision before."""
    if desired["rollouts"] and not desired["rollouts"][0]["is_undo"] and rng.random() < 0.3:
        return [["rollout", "undo"]]
    name = f"v{desired['version']}"
    start = ["rollout", "start", "--revision", name, "--set", f"worker.max_sequences={rng.randint(16, 64)}"]
    if is_roomy and rng.random() < 0.4:
        start += ["--max-surge", "0", "--max-unavailable", "1"]
    return [start] if rng.random() < 0.5 else [[*start, "--no-wait"], ["rollout", "undo"]]


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
    flips = sorted(row["flip_ms"] for row in rows if "flip_ms" in row)
    if flips:
        print(
            f"{len(flips):7} flips without their drain: {flips[len(flips) // 2]} ms at the median, {flips[-1]} at most"
        )
        print(f"{sum(row.get('held_tokens', 0) for row in rows):7} prompt tokens held by them, all still known there")
    print(
        f"{sum(row['answers'] for row in rows):7} requests answered during commands, every answer the undisturbed one"
    )


if __name__ == "__main__":
    sys.exit(main())
