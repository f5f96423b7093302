"""Clients that leave at random moments: within a second nothing of them is left at the router or the workers.

They leave one real cluster in waves, streamed, whole and over gRPC; the workers are asked what they hold.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from proof.record import Record, arguments_of, said_how_to_repeat
from tests.chaos.departures import CLIENTS, simulated, wave

LONGEST_S = 1.0


def main() -> int:
    parser = arguments_of("departures", __doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--waves", type=int, default=60)
    arguments = parser.parse_args()
    about = {"seed": arguments.seed, "waves": arguments.waves, "clients": CLIENTS * arguments.waves}
    record = Record(arguments.out, "departures", about, is_fresh=arguments.fresh)
    if not record.content:
        with said_how_to_repeat("departures", f"--seed {arguments.seed} --waves {arguments.waves}"):
            record.content |= _run(arguments.seed, arguments.waves)
        record.save()
    print(json.dumps(record.content, indent=1))
    is_late = record.content["free_after_s"]["longest"] > LONGEST_S
    if is_late:
        print(f"broken: something was held for longer than {LONGEST_S:g} s", file=sys.stderr)
    return record.verdict(arguments.waves, broken=int(is_late))


def _run(seed: int, waves: int) -> dict[str, Any]:
    rng, phases, free_s = random.Random(seed), Counter[str](), []
    with tempfile.TemporaryDirectory(prefix="td-") as folder, simulated(Path(folder)) as cluster:
        for _ in range(waves):
            one = wave(cluster, rng)
            phases += one.phases
            free_s.append(one.free_after_s)
    return {
        "left_in": dict(sorted(phases.items())),
        "free_after_s": {"median": round(statistics.median(free_s), 3), "longest": round(max(free_s), 3)},
    }


if __name__ == "__main__":
    sys.exit(main())
