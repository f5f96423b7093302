"""docs/metrics.md agrees with the module of names; other pages name metrics that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tandem.core.metric_names import CATALOGUE
from tools import metrics_page

PAGES = sorted((Path(__file__).resolve().parents[3] / "docs").rglob("*.md"))


def test_the_page_is_what_the_names_are() -> None:
    assert metrics_page.FILE.read_text() == metrics_page.text(), "run `python -m tools.metrics_page`"


def test_every_metric_has_one_row() -> None:
    rows = re.findall(r"^\| `([\w:]+)` \|", metrics_page.text(), flags=re.MULTILINE)
    assert sorted(rows) == sorted(CATALOGUE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.name))
def test_metrics_that_pages_name_exist(page: Path) -> None:
    named = set(re.findall(r"\b(tandem_\w+?(?:_total|_seconds|_bytes|_blocks|_tokens|_requests))\b", page.read_text()))
    assert named - set(CATALOGUE) == set()
