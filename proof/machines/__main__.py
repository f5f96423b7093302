"""State machines of the hand-over run for long: workers, router and wires in every order that a seed draws.

Walks through a cluster in memory (`cluster`) and over one pair of transfer ends (`frames`), one seed after the other
for as long as --budget-s allows; finished seeds are kept in --out, so a run that was stopped goes on where it was. One
seed alone: --part cluster --seed N --count 1 --out FILE.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections import Counter

from proof.record import CUT, Record, arguments_of
from tests.unit.simulation.frame_walk import frame_walk
from tests.unit.simulation.walk import Walk

PARTS = ("cluster", "frames")
EVENTS = {"cluster": 2000, "frames": 300}
CHUNK = 20
"""Seeds between two lines of progress, and between two savings."""


def main() -> int:
    parser = arguments_of("machines", __doc__)
    parser.add_argument("--part", choices=PARTS, action="append", help="which walks; all without it")
    parser.add_argument("--seed", type=int, default=1, help="the first seed")
    parser.add_argument("--count", type=int, default=2000, help="how many seeds of each part")
    parser.add_argument(
        "--budget-s", type=float, default=1200.0,
        help=f"begin no further seeds after so many seconds; exit status {CUT} if some are left",
    )  # fmt: skip
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)  # every walk has failures on purpose
    about = {"first_seed": arguments.seed, "events": EVENTS}
    record = Record(arguments.out, "machines", about, is_fresh=arguments.fresh)
    tallies: dict[str, dict[str, int]] = record.content.setdefault("parts", {})
    parts = arguments.part or PARTS
    for index, part in enumerate(parts):
        if not _run_part(part, record, arguments.seed, arguments.count, arguments.budget_s / len(parts)):
            return 1
        print(f"{index + 1} of {len(parts)} parts: {json.dumps(tallies.get(part, {}))}")
    seeds = [tallies.get(part, {}).get("seeds", 0) for part in parts]
    return record.verdict(sum(seeds), left=sum(max(0, arguments.count - count) for count in seeds))


def _run_part(part: str, record: Record, first: int, count: int, limit_s: float) -> bool:
    """Seeds from where the record ends; False at the first broken promise."""
    begun_s = time.monotonic()
    tally = Counter(record.content["parts"].get(part, {}))
    while tally["seeds"] < count and time.monotonic() - begun_s < limit_s:
        for _ in range(min(CHUNK, count - tally["seeds"])):
            seed = first + tally["seeds"]
            try:
                tally.update(_walk(part, seed))
            except AssertionError as error:
                print(f"seed {seed} of {part} breaks a promise: {error}", file=sys.stderr)
                options = f"--part {part} --seed {seed} --count 1 --fresh --out build/again.json"
                print(f"again: python -m proof.machines {options}", file=sys.stderr)
                return False
            tally["seeds"] += 1
        record.content["parts"][part] = dict(sorted(tally.items()))
        record.save()
        print(f"{part}: {tally['seeds']} seeds in {time.monotonic() - begun_s:.0f} s", flush=True)
    return True


def _walk(part: str, seed: int) -> Counter[str]:
    if part == "frames":
        pair = frame_walk(seed, EVENTS[part])
        return Counter(events=EVENTS[part], transfers=len(pair.sendings), admitted=pair.verified)
    told = Walk(seed).run(EVENTS[part])
    names = (
        "requests", "attempts", "finished", "failed", "cancelled", "handovers", "frames", "Verified", "Failed",
        "SendCompleted", "SendFailed", "Quiesced", "tickets_revoked", "tickets_queued", "transfers_forgotten",
        "preemptions", "dropped_fenced", "dropped_checksum", "dropped_duplicate", "dropped_malformed",
        "dropped_wrong_incarnation",
    )  # fmt: skip
    return Counter({name: told[name] for name in names}) + Counter(events=EVENTS[part])


if __name__ == "__main__":
    sys.exit(main())
