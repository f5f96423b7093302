"""Hostile grammars: each ends in an answer or a refusal, and none takes more of others than a step.

Schemas, regular expressions, Lark, GBNF, choices and tags are made by seed: deep, wide, exponential, recursive, full of
patterns and giant numbers, or mutations of `--sample`. A process tries each as a router and a worker do: the check, the
compiling, drafts and masks of some tokens. It is ended where an input takes more than PATIENCE_S. Finished inputs are
kept in --out, in groups of GROUP. Then a cluster gets the first --beside of them and the worst of each group, while an
honest client streams (proof/grammars/beside.py).
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.report import ROOT, quantile
from proof.grammars import beside
from proof.grammars.inputs import Inputs
from proof.record import Record, arguments_of, say_how_to_repeat

PATIENCE_S = 60.0
GROUP = 250
LIMITS = {"parse_hold_s": 0.25, "check_hold_s": 0.25, "compile_hold_s": 0.25, "step_hold_s": 0.25, "check_s": 5.0,
          "compile_s": 5.0, "step_s": 1.0, "mib": 768.0}  # fmt: skip
"""Seconds of CPU time, and MiB of memory. `_hold_s`: seconds of the clock in which the event loop runs nothing else."""
WORST = ("check_s", "compile_s", "step_s")
"""The input of each group that took the most of these is named, and sent to a cluster by the other part."""


def main() -> int:
    parser = arguments_of("grammars", __doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--inputs", type=int, default=10_000, help="how many (default: 10,000)")
    parser.add_argument(
        "--beside", type=int, default=300, help="how many beside an honest client (default: 300; 0: none)"
    )
    parser.add_argument("--only", type=int, help="try this one alone, and print what it took")
    parser.add_argument("--sample", type=Path, help="schemas to mutate, as of the proof of schemas")
    arguments = parser.parse_args()
    if arguments.sample is not None and not arguments.sample.is_file():
        print(f"there is no file {arguments.sample}")
        return 2
    subject = Subject(arguments.seed, arguments.sample)
    if arguments.only is not None:
        found = subject.attempt(arguments.only)
        print(json.dumps(found, indent=1), *wrongs(found), sep="\n")
        subject.close()
        return int(bool(wrongs(found)))
    about = {"seed": arguments.seed, "sample": arguments.sample and arguments.sample.name}
    record = Record(arguments.out, "grammars", about, is_fresh=arguments.fresh)
    groups: dict[str, dict[str, Any]] = record.content.setdefault("groups", {})
    for start in range(0, arguments.inputs, GROUP):
        if str(start) in groups and not groups[str(start)]["broken"]:
            continue
        tried = {number: subject.attempt(number) for number in range(start, min(start + GROUP, arguments.inputs))}
        groups[str(start)] = summary(tried)
        record.save()
        print(f"{start + len(tried)} of {arguments.inputs}: {json.dumps(groups[str(start)]['ends'])}", flush=True)
    subject.close()
    broken = [f"input {number}: {what}" for group in groups.values() for number, what in group["broken"].items()]
    if arguments.beside:
        if record.content.get("beside", {"broken": True})["broken"]:
            worst = (number for group in groups.values() for number in group["worst"].values())
            numbers = dict.fromkeys((*range(arguments.beside), *worst))
            record.content["beside"] = beside.run(Inputs(arguments.seed, arguments.sample), tuple(numbers))
            record.save()
            print(json.dumps(record.content["beside"]))
        broken += record.content["beside"]["broken"]
    if broken:
        print(*broken, sep="\n")
        say_how_to_repeat("grammars", f"--seed {arguments.seed}")
    return record.verdict(sum(group["inputs"] for group in groups.values()), broken=len(broken))


def summary(tried: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Counts of a group by how its inputs ended, the most that one took, and what is wrong."""
    ends = Counter("refused" if "refused" in one else "limited" if "failed" in one else "followed"
                   for one in tried.values())  # fmt: skip
    most = {name: round(max(one.get(name, 0.0) for one in tried.values()), 4) for name in LIMITS}
    median = {
        name: round(quantile([one.get(name, 0.0) for one in tried.values()], 50), 5) for name in ("check_s", "step_s")
    }
    worst = {name: max(tried, key=lambda number: tried[number].get(name, 0.0)) for name in WORST}
    return {
        "inputs": len(tried), "ends": dict(ends), "most": most, "median": median, "worst": worst,
        "broken": {str(number): wrong for number, one in tried.items() if (wrong := wrongs(one))},
    }  # fmt: skip


def wrongs(found: Mapping[str, Any]) -> list[str]:
    """Promises that an input broke."""
    over = [f"{name} is {found[name]:.3f}, and may be {limit}" for name, limit in LIMITS.items()
            if found.get(name, 0.0) > limit]  # fmt: skip
    return [*([found["ended"]] if "ended" in found else []), *over]


class Subject:
    """The process in which inputs are tried; begun anew where it ended."""

    def __init__(self, seed: int, sample: Path | None) -> None:
        self._command = [sys.executable, "-m", "proof.grammars.subject", "--seed", str(seed)]
        if sample is not None:
            self._command += ["--sample", str(sample.resolve())]
        self._process: subprocess.Popen[str] | None = None

    def attempt(self, number: int) -> dict[str, Any]:
        """Outcome and costs of an input; `ended`: reason why it has no end of its own."""
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{number}\n")
        process.stdin.flush()
        is_answered = bool(select.select([process.stdout], [], [], PATIENCE_S)[0])
        line = process.stdout.readline() if is_answered else ""
        if line:
            return dict(json.loads(line))
        with process:
            process.kill()
        code, self._process = process.returncode, None
        return {"ended": f"the process ended with {code}" if is_answered else f"no end within {PATIENCE_S:.0f} s"}

    def close(self) -> None:
        """End the process."""
        if self._process is not None and self._process.stdin is not None:
            with self._process:  # which closes its pipes and waits
                self._process.stdin.close()

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            self._process = subprocess.Popen(
                self._command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        return self._process


if __name__ == "__main__":
    sys.exit(main())
