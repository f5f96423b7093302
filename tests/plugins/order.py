"""The order of test files: longest first, by the seconds in `tests/durations.json`, so that parallel runners end
together. Tests of a file keep their order. Unit tests that took long are marked `slow`.

`make test-times` writes `durations.json`. A file that it does not know counts as the median.
"""

import json
import statistics
from pathlib import Path

import pytest

DURATIONS = Path(__file__).resolve().parents[1] / "durations.json"


class Order:
    """Sorts the collected tests, and marks the slow ones."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        measured = json.loads(DURATIONS.read_text())
        slow = set(measured["slow"])
        for item in items:
            if item.nodeid in slow:
                item.add_marker(pytest.mark.slow)
        known: dict[str, float] = measured["files"]
        usual_s = statistics.median(known.values()) if known else 0.0
        items.sort(key=lambda item: (-known.get(file := file_of(item.nodeid), usual_s), file))


def file_of(nodeid: str) -> str:
    return nodeid.split("::", 1)[0]
