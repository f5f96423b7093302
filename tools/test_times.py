"""Make the tables of docs/testing.md and `tests/durations.json` from the records of `pytest --record`
(`make test-times`).

Reads `build/tests.jsonl*`, which `make test` leaves, or the files that are named. `durations.json` has the seconds of
each file, by which runners order their work, and the unit tests that took more than `SLOW_S` of CPU time, which
`make unit` leaves out.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE, DURATIONS = ROOT / "docs" / "testing.md", ROOT / "tests" / "durations.json"
BEGIN, END = "<!-- times: begin -->", "<!-- times: end -->"
SLOW_S = 0.3
ROWS = 12
HEAD = "number | wall, s | CPU here, s | CPU of children, s | not computing |\n|---|---|---|---|---|---|"
Line = dict[str, Any]


def read(files: Iterable[Path]) -> list[Line]:
    return [json.loads(line) for path in files for line in path.read_text().splitlines()]


def file_of(line: Line) -> str:
    return str(line["test"]).split("::", 1)[0]


def durations(lines: list[Line]) -> dict[str, Any]:
    """Seconds by file, and slow unit tests by name."""
    seconds: Counter[str] = Counter()
    slow = set()
    for line in (line for line in lines if "test" in line):
        seconds[file_of(line)] += line["wall_s"]
        if line["cpu_s"] + line["children_cpu_s"] > SLOW_S and line["test"].startswith("tests/unit/"):
            slow.add(line["test"])
    return {
        "files": {name: round(took_s, 1) for name, took_s in sorted(seconds.items())},
        "slow": sorted(slow),
    }  # fmt: skip


def tables(lines: list[Line]) -> str:
    """Markdown: time by folder, the slowest files, the costliest fixtures and where tests wait."""
    tests = [line for line in lines if "test" in line]
    by_folder: dict[str, list[Line]] = defaultdict(list)
    by_file: dict[str, list[Line]] = defaultdict(list)
    for line in tests:
        parts = file_of(line).split("/")
        by_folder["/".join(parts[1:3]) if parts[1] in ("unit", "integration") else parts[1]].append(line)
        by_file[file_of(line)].append(line)
    text = [f"| tests | {HEAD}"]
    text += [_row(f"`{name}`", found) for name, found in _longest(by_folder, 40)]
    text += [_row("all", tests), "", f"The {ROWS} slowest files:", ""]
    text += [f"| file | {HEAD}"]
    text += [_row(f"`{name.removeprefix('tests/')}`", found) for name, found in _longest(by_file, ROWS)]
    fixtures: Counter[str] = Counter()
    uses: Counter[str] = Counter()
    for line in (line for line in lines if "fixture" in line):
        fixtures[line["fixture"]] += line["wall_s"]
        uses[line["fixture"]] += 1
    text += ["", "The costliest fixtures:", "", "| fixture | set up | wall, s |", "|---|---|---|"]
    text += [f"| `{name}` | {uses[name]} | {took_s:.0f} |" for name, took_s in fixtures.most_common(ROWS)]
    places: Counter[str] = Counter()
    for line in tests:
        places.update(line["places"])
    if places:
        text += ["", "Where the main thread of the tests stood longest:", "", "| place | s |", "|---|---|"]
        text += [f"| `{name}` | {took_s:.0f} |" for name, took_s in places.most_common(ROWS)]
    largest = max(tests, key=lambda line: int(line["rss_mib"]))
    text += ["", f"Largest process of the tests: {largest['rss_mib']} MiB resident, after `{largest['test']}`."]
    return "\n".join(text)


def _longest(groups: dict[str, list[Line]], most: int) -> list[tuple[str, list[Line]]]:
    return sorted(groups.items(), key=lambda item: -sum(line["wall_s"] for line in item[1]))[:most]


def _row(name: str, lines: list[Line]) -> str:
    wall, own, children = (sum(line[key] for line in lines) for key in ("wall_s", "cpu_s", "children_cpu_s"))
    waits = sum(max(0.0, line["wall_s"] - line["cpu_s"] - line["children_cpu_s"]) for line in lines)
    return f"| {name} | {len(lines)} | {wall:.0f} | {own:.0f} | {children:.0f} | {waits / max(wall, 1e-9):.0%} |"


def main() -> int:
    files = [Path(name) for name in sys.argv[1:]] or sorted((ROOT / "build").glob("tests.jsonl*"))
    if not files:
        print("no records: run `make test` first, or name files that `pytest --record` wrote", file=sys.stderr)
        return 2
    lines = read(files)
    DURATIONS.write_text(json.dumps(durations(lines), indent=0) + "\n")
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{tables(lines)}\n{END}{rest.split(END)[1]}")
    print(f"{len(lines)} lines: {DURATIONS.relative_to(ROOT)} and {PAGE.relative_to(ROOT)} are written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
