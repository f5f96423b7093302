"""Answers with drafts, each beside the same without: in every arrangement of a cluster and after every disturbance.

Requests of many settings are asked for without drafts and then with, computed deterministically: text, ends, logprobs
and usage are the same to the letter. The arrangements are a mixed worker; a hand-over of every request; a decode and a
prefill worker killed while they have answers; a pool so small that requests are preempted; two tensor-parallel ranks.
At the end of each, no block is held and nothing is in flight. Finished requests are kept in --out.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from proof.record import Record, arguments_of, say_how_to_repeat
from proof.speculation.drafted_requests import drafted, request
from tests.chaos.strikes import Cell, strike
from tests.chaos.survivors import Client
from tests.integration.router.transcript import Transcript
from tools.running_cluster import Cluster, is_free, running
from tools.waiting import wait_for

EXACT = ("--threads", "1", "--deterministic", "--dtype", "float32", "--quantize", "none", "--speculation", "copy")
HANDED_OVER = ("--disaggregation", "always")
ARRANGEMENTS: Mapping[str, Sequence[str]] = {
    "mixed": ("--mixed", "1"),
    "1+1": ("--prefill", "1", "--decode", "1", *HANDED_OVER),
    "decode killed": ("--prefill", "2", "--decode", "2", *HANDED_OVER),
    "prefill killed": ("--prefill", "2", "--decode", "2", *HANDED_OVER),
    "preempted": ("--mixed", "1", "--kv-memory", "3MiB", "--max-model-len", "512"),
    "tp2": ("--mixed", "1", "--tp", "2"),
}
KILLS = {
    "decode killed": Cell("decode", "decode", "kill host"),
    "prefill killed": Cell("prefill", "prefill", "kill host"),
}
TOGETHER = 22
"""Requests at once."""
FREE_S = 60.0
COUNTERS = {
    "accepted": "tandem_spec_decode_num_accepted_tokens_total", "drafted": "tandem_spec_decode_num_draft_tokens_total",
    "preempted": "tandem_preemptions_total", "again": "tandem_reattempts_total",
}  # fmt: skip


def main() -> int:
    parser = arguments_of("speculation", __doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--requests", type=int, default=1650, help="of each arrangement")
    parser.add_argument("--budget", type=float, default=math.inf, help="begin nothing new after so many seconds")
    parser.add_argument("--arrangements", nargs="+", choices=ARRANGEMENTS, default=list(ARRANGEMENTS))
    arguments = parser.parse_args()
    ends_s = time.monotonic() + arguments.budget
    record = Record(arguments.out, "speculation", {"seed": arguments.seed}, is_fresh=arguments.fresh)
    for name in arguments.arrangements:
        done = record.content.setdefault(name, {})
        todo = [number for number in range(arguments.requests) if done.get(str(number)) != "same"]
        if todo and time.monotonic() < ends_s:
            tried(record, name, arguments.seed, todo, ends_s)
    outcomes = {f"{name}, {number}": outcome for name in arguments.arrangements
                for number, outcome in record.content[name].items()}  # fmt: skip
    broken = {where: outcome for where, outcome in outcomes.items() if outcome != "same"}
    print(json.dumps(record.content.get("counted"), indent=1))
    for where, what in broken.items():
        print(f"{where}: {what}")
    if broken:
        say_how_to_repeat("speculation", f"--seed {arguments.seed}")
    wanted = arguments.requests * len(arguments.arrangements)
    return record.verdict(len(outcomes), left=max(0, wanted - len(outcomes)), broken=len(broken))


def tried(record: Record, name: str, seed: int, numbers: Sequence[int], ends_s: float = math.inf) -> None:
    """Ask a cluster for the requests, some at a time until that second; put outcomes and counters on record."""
    flags = ARRANGEMENTS[name]
    memory = () if "--kv-memory" in flags else ("--kv-memory", "256MiB")
    done = record.content.setdefault(name, {})
    counted = record.content.setdefault("counted", {}).setdefault(name, dict.fromkeys(COUNTERS, 0))
    with running(*flags, *memory, *EXACT) as cluster:
        for start in range(0, len(numbers), TOGETHER):
            if time.monotonic() > ends_s:
                break
            batch = numbers[start : start + TOGETHER]
            bodies = {str(number): request(seed, number)[1] for number in batch}
            plain = {key: client.transcript() for key, client in asked(cluster, bodies).items()}
            with_drafts = {key: drafted(seed, int(key), body, plain[key]) for key, body in bodies.items()}
            before, kill = counters(cluster), KILLS.get(name)
            clients = asked(cluster, with_drafts) if kill is None else strike(cluster, kill, with_drafts).clients
            found = {key: outcome(clients[key].transcript(), plain[key]) for key in bodies}
            try:
                wait_for(lambda: is_free(cluster), FREE_S, "no block is held and nothing in flight")
            except AssertionError as error:
                found = dict.fromkeys(bodies, f"one of {len(bodies)}: {error}")
            done |= found
            for counter, value in counters(cluster).items():
                counted[counter] += max(0, value - before[counter])
            record.save()
            print(f"{name}: {len(done)}", flush=True)


def asked(cluster: Cluster, bodies: Mapping[str, Mapping[str, Any]]) -> dict[str, Client]:
    """All at once."""
    return {key: Client(cluster, body) for key, body in bodies.items()}


def counters(cluster: Cluster) -> dict[str, int]:
    """Sums over all workers; those of a killed one are gone."""
    return {name: int(cluster.metric(metric)) for name, metric in COUNTERS.items()}


def outcome(found: Transcript, wanted: Transcript) -> str:
    """`same`, or what differs."""
    if errors := wanted.errors + found.errors:
        return f"errors: {errors}"
    if not found.is_well_formed:
        return f"not well formed: {found}"
    if found != wanted:
        texts = [[choice.text for choice in one.choices.values()] for one in (found, wanted)]
        return f"{texts[0]} instead of {texts[1]}" if texts[0] != texts[1] else f"{found} instead of {wanted}"
    return "same"


if __name__ == "__main__":
    sys.exit(main())
