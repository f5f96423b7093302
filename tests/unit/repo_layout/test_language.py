"""Docstrings and comments are plain technical English; the counts of old habits may only fall."""

from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tools.language import HABITS, MOST, ROOT, count, files

FOLDERS = sorted(path.parent.name for path in ROOT.glob("*/tandem") if path.parent.name != "protogen")
RIGS = ["bench", "proof", "tests", "tools"]
MOST_CLAUSES = 3
"""Summaries that begin with What, Who, Whether or Which, in all folders; lower it with every one that goes."""


@cache
def counted(group: str) -> Counter[str]:
    return count(files(FOLDERS if group == "product" else RIGS))


@pytest.mark.parametrize("habit", HABITS)
@pytest.mark.parametrize("group", ["product", "rigs"])
def test_a_habit_is_rare(group: str, habit: str) -> None:
    found = counted(group)
    assert found["words"] > 40_000
    assert 1000 * found[habit] / found["words"] <= MOST[habit], (
        f"python -m tools.language names the places of {habit!r}"
    )


def test_summaries_are_no_clauses() -> None:
    assert counted("product")["clause"] + counted("rigs")["clause"] <= MOST_CLAUSES


def test_names_in_backticks_do_not_count(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text('"""Return `said` of the worker."""\n\nx = 1  # what nobody said\n')
    found = count([module])
    assert (found["says"], found["nobody"], found["who"], found["clause"]) == (1, 1, 0, 0)
