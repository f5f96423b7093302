"""Workers that stand still until all others gave them up, and wake up: they are out of rotation in 3 s, and come back
under another incarnation; one that is killed is out in 1 s.

Each role × idle or at work × the fate of the volatile store meanwhile (nothing, emptied, an old dump, Redis started on
its old files), and kill -9 of a host or a rank of either role. No request may fail, every answer is held against the
oracle, and the old incarnation may have written nothing. Entries that are done stay in --out.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from proof.record import Record, add_every, arguments_of, said_how_to_repeat, share
from tests.chaos.frozen import CELLS, Cell, FrozenScene, frozen_scene

STOPPED_S, KILLED_S = 3.0, 1.0
"""Bound on the time until it is out of rotation."""
KILLS = list(itertools.product(("prefill", "decode"), ("host", "rank")))
ENTRIES: list[Cell | tuple[str, str]] = [*CELLS, *KILLS]


def main() -> int:
    parser = arguments_of("frozen", __doc__)
    parser.add_argument("--seed", type=int, default=1, help="the first seed")
    parser.add_argument("--passes", type=int, default=3, help="how often all of it is gone through")
    add_every(parser)
    parser.add_argument("--only", choices=[_name(entry) for entry in ENTRIES], metavar="ENTRY", help="one alone")
    parser.add_argument("--seconds", type=float, default=900.0, help="after which nothing is begun")
    arguments = parser.parse_args()
    record = Record(arguments.out, "frozen", {}, is_fresh=arguments.fresh)
    entries: dict[str, dict[str, Any]] = record.content.setdefault("entries", {})
    wanted = [
        (entry, seed)
        for seed in range(arguments.seed, arguments.seed + arguments.passes)
        for entry in share(ENTRIES, seed, arguments.every)
        if arguments.only in (None, _name(entry))
    ]
    todo = [one for one in wanted if _key(*one) not in entries]
    if todo:
        _run(todo, record, time.monotonic() + arguments.seconds)
    done = {_key(*one): entries[_key(*one)] for one in wanted if _key(*one) in entries}
    summary = _summary(list(entries.values()))
    if record.has_new and record.content.get("summary") != summary:
        record.content["summary"] = summary
        record.save()
    for what, found in summary.items():
        print(f"{what}: {found}")
    late = [key for key, found in done.items() if found["out_s"] > _limit_s(found)]
    if late:
        print(f"broken: still in rotation after {STOPPED_S:g} s (stopped) or {KILLED_S:g} s (killed): {late}")
    return record.verdict(len(done), left=len(wanted) - len(done), broken=len(late))


def _run(todo: Sequence[tuple[Cell | tuple[str, str], int]], record: Record, ends_s: float) -> None:
    with tempfile.TemporaryDirectory(prefix="td-") as folder, frozen_scene(Path(folder), todo[0][1]) as scene:
        for entry, seed in todo:
            if time.monotonic() > ends_s:
                return
            with said_how_to_repeat("frozen", f'--seed {seed} --passes 1 --only "{_name(entry)}"'):
                found = _one(scene, entry)
            record.content["entries"][_key(entry, seed)] = found
            record.save()
            print(f"{_key(entry, seed)}: {found}", flush=True)


def _one(scene: FrozenScene, entry: Cell | tuple[str, str]) -> dict[str, Any]:
    if isinstance(entry, Cell):
        return asdict(scene.freeze(entry))
    return {"out_s": round(scene.kill(*entry), 2)}


def _summary(done: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Summary of all on record, under any seed: times of those that were stopped, and of those that were killed."""
    stopped = [found for found in done if "back_s" in found]
    times = {
        "stopped, out of rotation": [found["out_s"] for found in stopped],
        "woken up, back as somebody else": [found["back_s"] for found in stopped],
        "killed, out of rotation": [found["out_s"] for found in done if "back_s" not in found],
    }
    return {
        what: {"of": len(seconds), "median_s": round(statistics.median(seconds), 2), "worst_s": max(seconds)}
        for what, seconds in times.items()
        if seconds
    }


def _limit_s(found: dict[str, Any]) -> float:
    return STOPPED_S if "back_s" in found else KILLED_S


def _name(entry: Cell | tuple[str, str]) -> str:
    return str(entry) if isinstance(entry, Cell) else "{} worker, kill {}".format(*entry)


def _key(entry: Cell | tuple[str, str], seed: int) -> str:
    return f"{_name(entry)}, seed {seed}"


if __name__ == "__main__":
    sys.exit(main())
