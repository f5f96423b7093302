"""Runs every case of the tests of which `make test` draws some, and the long scenes of which it draws one.

These are the tests with the mark `drawn` (`tests/plugins/drawn.py`). An entry is a test file, with how many of its
tests passed and how long they took. A file that failed or changed is run again; the others are kept.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zlib import crc32

from proof.record import Record, arguments_of, say_how_to_repeat

ROOT = Path(__file__).resolve().parents[2]
PYTEST = (sys.executable, "-m", "pytest", "-q", "--full", "-p", "no:cacheprovider")


def main() -> int:
    arguments = _arguments()
    record = Record(arguments.out, "matrices", {}, is_fresh=arguments.fresh)
    entries: dict[str, dict[str, Any]] = record.content.setdefault("files", {})
    files = arguments.file or _files()
    digests = {file: f"{crc32((ROOT / file).read_bytes()):08x}" for file in files}
    for file in files:
        if (known := entries.get(file)) and (known["failed"] or known["digest"] != digests[file]):
            del entries[file]
    until_s = time.monotonic() + arguments.budget_s
    for number, file in enumerate(files, 1):
        if file in entries:
            continue
        if time.monotonic() > until_s:
            break
        print(f"{number} of {len(files)}: {file}", flush=True)
        entries[file] = {"digest": digests[file], **_run(file)}
        record.save()
        if entries[file]["failed"]:
            say_how_to_repeat("matrices", f"--file {file}")
    done = [entries[file] for file in files if file in entries]
    return record.verdict(len(done), left=len(files) - len(done), broken=sum(bool(entry["failed"]) for entry in done))


def _files() -> list[str]:
    """The files with such tests, in the order of their names. SystemExit if pytest cannot collect them."""
    done = subprocess.run(
        [*PYTEST, "--collect-only", "-m", "drawn", "tests"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    found = sorted({line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line})
    if done.returncode or not found:
        raise SystemExit(f"pytest cannot collect the tests:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return found


def _run(file: str) -> dict[str, Any]:
    """Counts of what passed, failed and was skipped, and the seconds it took."""
    with TemporaryDirectory(prefix="td-") as folder:
        report = Path(folder) / "report.xml"
        status = subprocess.run(
            [*PYTEST, "-m", "drawn", f"--junitxml={report}", file], cwd=ROOT, check=False
        ).returncode
        suite = ElementTree.parse(report).getroot()[0] if report.exists() else None
    if suite is None:
        return {"passed": 0, "failed": 1, "skipped": 0, "seconds": 0.0}
    failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    skipped = int(suite.get("skipped", 0))
    return {
        "passed": int(suite.get("tests", 0)) - failed - skipped, "failed": failed or int(status != 0),
        "skipped": skipped, "seconds": round(float(suite.get("time", 0)), 1),
    }  # fmt: skip


def _arguments() -> argparse.Namespace:
    parser = arguments_of("matrices", __doc__)
    parser.add_argument("--file", action="append", help="a test file; all with such tests without it")
    parser.add_argument(
        "--budget-s", type=float, default=float("inf"),
        help="begin no further file after so many seconds; exit status 75 if some are left",
    )  # fmt: skip
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
