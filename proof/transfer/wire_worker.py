"""Runs the cases of the wire part and of the matrix that it reads from stdin; one JSON line of results a case."""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import traceback
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from proof.transfer.plan import draw, matrix
from proof.transfer.wire import Report, Wire

SETTLED_AFTER, SLACK = 10, 16


class Growth:
    """Descriptors and threads of both processes after each case: those of the first cases, and no more."""

    def __init__(self) -> None:
        self._seen, self._most = 0, (0, 0, 0, 0)

    def check(self, held: tuple[int, ...]) -> list[str]:
        """Leaks, in words."""
        self._seen += 1
        if self._seen > SETTLED_AFTER:
            if any(now > most + SLACK for now, most in zip(held, self._most, strict=True)):
                return [f"after {self._seen} cases (descriptors, threads) × 2 are {held}, first {self._most}"]
        else:
            self._most = tuple(map(max, held, self._most))  # type: ignore[assignment]
        return []


def main() -> None:
    logging.disable(logging.WARNING)  # every case has failures on purpose
    cells = matrix()
    with tempfile.TemporaryDirectory(prefix="td-") as folder:
        wire: Wire | None = None
        for line in sys.stdin:
            job = json.loads(line)
            is_matrix = job["part"] == "matrix"
            case = cells[job["index"]] if is_matrix else draw(job["seed"], job["index"])
            if wire is None:
                wire, growth = Wire(Path(folder), Path(folder) / "sender.log"), Growth()
            try:
                report = wire.run(case, is_measuring=is_matrix)
                report.violations += [f"{case.name}: {words}" for words in growth.check(report.held)]
            except Exception:  # noqa: BLE001 - a result, too; the next case begins with a new sending process
                report = Report(violations=[f"{case.name} {case.setting}: {traceback.format_exc()}"])
                wire.close()
                wire = None
            hits, report.hits = dict(report.hits), Counter()  # `asdict` cannot copy a Counter
            result = asdict(report) | {"hits": hits, "index": job["index"], "transport": case.setting.transport}
            print(json.dumps(result), flush=True)
        if wire is not None:
            wire.close()


if __name__ == "__main__":
    main()
