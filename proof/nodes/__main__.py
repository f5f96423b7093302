"""A cluster on Ray over two machines, each a network namespace, through everything that happens to machines.

Each round starts `up --launcher ray` on one machine and joins another, with clients asking all the time and a spare
worker of every role beyond each blow: scaled from 1:1 to 2:4, the second machine dies, comes back (or another comes),
Ray's head dies, 3:1, then `up` itself dies and is started again, and all of it ends with `down`. Every time the desired
state is reached, no answer differs by a token from the undisturbed one, and at the end nothing is left: no process, no
shared memory, no folder. A seed draws how each blow falls. Needs root, `ip` and `unshare`; reports where it has not.
"""

from __future__ import annotations

import json
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from proof.nodes.scene import (
    HEAD_CPUS,
    NODE_CPUS,
    PATIENCE_S,
    Site,
    ask_exactly,
    check_logs,
    homes,
    strike_ray,
    transports,
    wait_reached,
)
from proof.record import Record, arguments_of, said_how_to_repeat
from tests.chaos.survivors import asks
from tests.e2e.under_load import ConstantLoad, changed
from tools.namespaces import Machine, NoNamespacesError, look_for_namespaces, machines
from tools.running_cluster import Cluster, is_alive
from tools.waiting import wait_for

ADDRESSES = ("10.203.78.1", "10.203.78.2", "10.203.78.3")
HEAD_PROCESSES = ("gcs_server", "ray.scripts.scripts start", "tandem.controlplane.ray.ray_start")
"""Ray's head, its starter, and our keeper of both."""
ANSWERS = 5
"""Requests that are answered after each step before the next one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """Faults of a round. `is_cut`: the dying machine's wire is taken out first, so nothing reports its death.
    `is_another`: another machine comes in its place. `are_named`: machines have names of their own; without, they look
    like one host, and shared memory is tried between them, in vain."""

    is_cut: bool = False
    is_another: bool = False
    are_named: bool = True
    head_process: str = HEAD_PROCESSES[0]

    @classmethod
    def of(cls, rng: random.Random) -> Draw:
        cut, another, named = (rng.random() < 0.5 for _ in range(3))
        return cls(is_cut=cut, is_another=another, are_named=named, head_process=rng.choice(HEAD_PROCESSES))


@dataclass(slots=True)
class Steps:
    """Durations of a round's steps, and the number of answers meanwhile."""

    load: ConstantLoad | None = None
    done: list[dict[str, Any]] = field(default_factory=list)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """A step, after which no answer may be wrong and some more have to come."""
        began_s, answered = time.monotonic(), self.load.answers if self.load else 0
        yield
        row: dict[str, Any] = {"step": name, "took_s": round(time.monotonic() - began_s, 1)}
        if self.load is not None:
            row["answers"] = self.load.answers - answered
            self.load.wait_more(ANSWERS)
            assert self.load.failures == [], (name, self.load.failures[:3])
        self.done.append(row)


def play(draw: Draw, seed: int, *, is_short: bool = False) -> list[dict[str, Any]]:
    """One round; its steps. `is_short`: `up` does not die. AssertionError at the first broken promise,
    NoNamespacesError where there are none."""
    names = ("tandem-a", "tandem-b", "tandem-c") if draw.are_named else ()
    with tempfile.TemporaryDirectory(prefix="td-n-") as folder, machines(Path(folder), ADDRESSES, names) as found:
        head, *nodes = found
        site, steps = Site(head, tuple(nodes)), Steps()
        with site.redis(), head.inside():
            _play(site, steps, draw, seed, is_short=is_short)
            try:
                wait_for(lambda: not site.left(), PATIENCE_S)
            except AssertionError as error:
                raise AssertionError(f"these are left: {site.left()}") from error
        return steps.done


def _play(site: Site, steps: Steps, draw: Draw, seed: int, *, is_short: bool) -> None:
    second = site.nodes[0]
    third = site.nodes[1] if draw.is_another else second
    with ExitStack() as stack:
        with site.up(1, 1) as cluster:
            with ConstantLoad(cluster, asks(20, 160, salt=seed)) as steps.load:
                with site.joined(second):
                    with steps.step("scaled from 1:1 to 2:4"):
                        changed(cluster, "scale", "--prefill", "2", "--decode", "4")
                        _check_places(site, cluster, second)
                    with steps.step("a machine died"):
                        _kill(site, cluster, second, is_cut=draw.is_cut)
                second.cut(False)
                joined = stack.enter_context(site.joined(third))
                with steps.step("a machine joined"):
                    _check_places(site, cluster, third)
                with steps.step("the head died"):
                    _strike_head(site, cluster, draw.head_process)
                    _check_places(site, cluster, third)
                with steps.step("scaled from 2:4 to 3:1"):
                    changed(cluster, "scale", "--prefill", "3", "--decode", "1")
                    wait_reached(cluster, 3, 1)
            steps.load = None
            if is_short:
                _down(cluster)
            else:
                kept = cluster.pids()["prefill-1"]
                cluster.process.kill()
                wait_for(lambda: list(site.head.processes()) == [site.redis_pid], PATIENCE_S, "all of `up` is gone")
        if not is_short:
            with steps.step("`up` was killed and started again"), site.up(3, 1) as cluster:
                wait_reached(cluster, 3, 1)
                assert cluster.pids()["prefill-1"] == kept, "a worker on another machine goes on, whoever controls it"
                ask_exactly(cluster)
                site.look()
                _down(cluster)
        with steps.step("the other machine left"):
            joined.send_signal(signal.SIGINT)
            assert joined.wait(PATIENCE_S) == 0


def _check_places(site: Site, cluster: Cluster, other: Machine) -> None:
    """2:4 are reached: as many on the head's machine as it has room for, which is one of each role, and the rest on the
    other one. KV goes between them over the transport that was measured as faster, and not over memory that they do not
    share."""
    where = wait_reached(cluster, 2, 4)
    assert Counter(where.values()) == {site.head.address: HEAD_CPUS, other.address: NODE_CPUS}, where
    ask_exactly(cluster)
    between = wait_for(lambda: transports(cluster, where), PATIENCE_S, "KV goes from one machine to the other")
    assert between <= {"tcp", "grpc"}, between
    check_logs(cluster, next(worker for worker, home in where.items() if home == other.address), other)
    site.look()


def _kill(site: Site, cluster: Cluster, machine: Machine, *, is_cut: bool) -> None:
    """A machine dies. The rest serves, and workers that lost their places report what they miss."""
    if is_cut:
        machine.cut()
    site.kill(machine)
    wait_for(lambda: set(homes(cluster).values()) == {site.head.address}, PATIENCE_S, "its leases are over")
    missing = f"waiting for a place: needs 1 CPU on one node: {site.head.address} has 0 of {HEAD_CPUS} CPU free"
    lost = [re.compile(f"{worker} +{missing}") for worker in ("prefill-1", "decode-1", "decode-2", "decode-3")]
    wait_for(lambda: all(line.search(cluster.output) for line in lost), PATIENCE_S, f"all say {missing!r}")


def _strike_head(site: Site, cluster: Cluster, name: str) -> None:
    """The head dies and is started again: workers on its machine with it, those on others do not notice."""
    where, pids = homes(cluster), cluster.pids()
    lost = [pid for worker, home in where.items() if home == site.head.address for pid in pids[worker]]
    strike_ray(site, name)
    wait_for(lambda: not any(map(is_alive, lost)), PATIENCE_S, "workers on the head's machine are gone")
    wait_for(lambda: "the head runs again" in cluster.output, PATIENCE_S)
    wait_reached(cluster, 2, 4)
    stayed = {worker: pids[worker] for worker, home in where.items() if home != site.head.address}
    now = cluster.pids()
    assert {worker: now[worker] for worker in stayed} == stayed, (stayed, now)


def _down(cluster: Cluster) -> None:
    code, _, error = cluster.clusterctl("down", "--yes")
    assert code == 0, error
    assert cluster.process.wait(PATIENCE_S) == 0, cluster.output


def main() -> int:
    parser = arguments_of("nodes", __doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=1500.0, help="after which no round is begun")
    arguments = parser.parse_args()
    record = Record(arguments.out, "nodes", {"seed": arguments.seed}, is_fresh=arguments.fresh)
    rounds: dict[str, dict[str, Any]] = record.content.setdefault("rounds", {})
    ends_s = time.monotonic() + arguments.seconds
    todo = [number for number in range(arguments.rounds) if str(number) not in rounds]
    if todo:
        try:
            look_for_namespaces()
        except NoNamespacesError as error:
            print(f"nothing was run: network namespaces are not to be had here: {error}", file=sys.stderr)
            return 2
    for number in todo:
        if time.monotonic() > ends_s:
            break
        draw = Draw.of(random.Random(f"{arguments.seed} {number}"))
        with said_how_to_repeat("nodes", f"--seed {arguments.seed} --rounds {number + 1}"):
            steps = play(draw, arguments.seed + number)
        rounds[str(number)] = {**asdict(draw), "steps": steps}
        record.save()
        print(f"round {number}: {json.dumps(rounds[str(number)])}", flush=True)
    done = [rounds[str(number)] for number in range(arguments.rounds) if str(number) in rounds]
    answers = sum(step.get("answers", 0) for played in done for step in played["steps"])
    print(f"{answers} requests answered while machines came and went, every answer the undisturbed one")
    return record.verdict(len(done), left=arguments.rounds - len(done))


if __name__ == "__main__":
    sys.exit(main())
