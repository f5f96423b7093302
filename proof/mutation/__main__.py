"""Changes the code in small ways and looks whether a test notices: transfer, ledger, scheduler, hashes, index, policy.

A seeded sample of cosmic-ray's mutants of every target (`--sample` each; 0 = all; a larger one holds the smaller). Each
is put into a copy of the project, and the target's tests run there. Survivors that change no behaviour are named with
the reason in harmless.json and do not count. Finished mutants are kept in --out, those of files that have changed since
are tried again; `--again` tries survivors again, after tests were written for them.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue
from random import Random
from typing import Any
from zlib import crc32

from proof.mutation.house import House, Outcome
from proof.mutation.mutants import Mutant, mutants
from proof.mutation.targets import ROOT, TARGETS, Target
from proof.record import CUT, Record, arguments_of

LEAST_SCORE = 0.85
_SURVIVED = "survived: "
_HARMLESS = Path(__file__).with_name("harmless.json")


def main() -> int:
    arguments = _arguments()
    record = Record(arguments.out, "mutation", {"seed": arguments.seed}, is_fresh=arguments.fresh)
    entries: dict[str, dict[str, Any]] = record.content.setdefault("targets", {})
    until_s = time.monotonic() + arguments.budget_s
    names = arguments.target or list(TARGETS)
    with tempfile.TemporaryDirectory(prefix="td-") as folder:
        houses: SimpleQueue[House] = SimpleQueue()
        for number in range(arguments.jobs):
            houses.put(House(Path(folder) / str(number)))
        for name in names:
            entry = _entry(TARGETS[name], entries.get(name, {}), is_again=arguments.again)
            entries[name] = entry
            for key, outcome in _tried(TARGETS[name], entry, arguments, houses, until_s):
                entry["tried"][key] = outcome
                record.save()
            _show(name, entry)
    done = [entries[name] for name in names]
    return record.verdict(
        sum(len(entry["tried"]) for entry in done),
        left=sum(entry["sampled"] - len(entry["tried"]) for entry in done),
        broken=sum(_score(entry) < LEAST_SCORE for entry in done if len(entry["tried"]) >= entry["sampled"]),
    )


def _entry(target: Target, known: Mapping[str, Any], *, is_again: bool) -> dict[str, Any]:
    """The known entry of a target, without mutants of files that have changed."""
    digests = {path: f"{crc32((ROOT / path).read_bytes()):08x}" for path in target.paths()}
    same = {path for path, digest in digests.items() if known.get("files", {}).get(path) == digest}
    tried = {
        key: outcome
        for key, outcome in {**known.get("beyond", {}), **known.get("tried", {})}.items()
        if key.partition(":")[0] in same and not (is_again and outcome.startswith(_SURVIVED))
    }
    return {"mutants": 0, "sampled": 0, "files": digests, "tried": tried, "beyond": {}}


def _tried(
    target: Target, entry: dict[str, Any], arguments: argparse.Namespace, houses: SimpleQueue[House], until_s: float
) -> Iterator[tuple[str, str]]:
    """Key and outcome of every mutant: `failed`, `hung`, or `survived: ` and the change."""
    found = mutants(ROOT, target.paths())
    sample = _sample(found, arguments.sample, arguments.seed)
    keys = {mutant.key for mutant in sample}
    tried = {key: outcome for key, outcome in entry["tried"].items() if key in keys}
    beyond = {key: outcome for key, outcome in entry["tried"].items() if key not in keys}  # of a larger sample
    entry |= {"mutants": len(found), "sampled": len(sample), "tried": tried, "beyond": beyond}
    left = [mutant for mutant in sample if mutant.key not in entry["tried"]]
    if not left:
        return
    print(f"{len(left)} mutants of {target.files[0]} and its like", flush=True)
    normal_s: dict[tuple[str, ...], float] = {}  # by what has to notice

    def run(mutant: Mutant) -> str:
        code = (ROOT / mutant.file).read_text()
        changed = mutant.source(code)
        if changed is None:
            raise RuntimeError(f"no mutant {mutant.key}")
        tests, house = target.tests_of(mutant.file), houses.get()
        try:
            if tests not in normal_s:
                normal_s[tests] = house.timed(tests)
            outcome = house.try_out(mutant.file, changed, tests, normal_s[tests])
        finally:
            houses.put(house)
        return f"{_SURVIVED}{change(code, changed)}" if outcome is Outcome.PASSED else outcome.value

    with ThreadPoolExecutor(arguments.jobs) as pool:
        waiting = iter(left)
        running = {pool.submit(run, mutant): mutant for _, mutant in zip(range(arguments.jobs), waiting, strict=False)}
        while running:
            done = next(as_completed(running))
            mutant = running.pop(done)
            yield mutant.key, done.result()
            if time.monotonic() < until_s and (following := next(waiting, None)):
                running[pool.submit(run, following)] = following


def change(before: str, after: str) -> str:
    """The lines that differ, as `before → after`."""
    lines = list(difflib.ndiff(before.splitlines(), after.splitlines()))
    old, new = ([line[2:].strip() for line in lines if line.startswith(sign)] for sign in "-+")
    return f"{' '.join(old)} → {' '.join(new)}"


def _sample(found: Sequence[Mutant], count: int, seed: int) -> Sequence[Mutant]:
    """The first ones of an order that depends on the seed alone."""
    return Random(seed).sample(found, len(found))[: count or None]


def _score(entry: Mapping[str, Any]) -> float:
    """Noticed ones among those that change behaviour."""
    noticed = sum(not outcome.startswith(_SURVIVED) for outcome in entry["tried"].values())
    return noticed / max(1, noticed + len(_survivors(entry)))


def _survivors(entry: Mapping[str, Any]) -> dict[str, str]:
    """Key → change, without the harmless ones."""
    harmless = json.loads(_HARMLESS.read_text())
    found = {key: outcome.removeprefix(_SURVIVED) for key, outcome in entry["tried"].items()}
    return {
        key: text
        for key, text in found.items()
        if text != entry["tried"][key] and text not in harmless.get(key.partition(":")[0], {})
    }


def _show(name: str, entry: Mapping[str, Any]) -> None:
    tried, hung = len(entry["tried"]), sum(outcome == Outcome.HUNG for outcome in entry["tried"].values())
    print(f"{name}: {entry['mutants']} mutants, {tried} tried ({hung} hung), score {_score(entry):.1%}")
    for key, text in sorted(_survivors(entry).items()):
        print(f"  survived  {key}: {text}")


def _arguments() -> argparse.Namespace:
    parser = arguments_of("mutation", __doc__)
    parser.add_argument("--target", choices=TARGETS, action="append", help="which ones; all without it")
    parser.add_argument("--sample", type=int, default=150, help="mutants of each target; 0: all")
    parser.add_argument("--seed", type=int, default=1, help="of the sample")
    parser.add_argument("--again", action="store_true", help="try survivors again")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="copies of the project to work in")
    parser.add_argument(
        "--budget-s", type=float, default=36_000.0,
        help=f"begin no further mutants after so many seconds; exit status {CUT} if some are left",
    )  # fmt: skip
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
