"""Decisions are numbered without a gap, no number twice, and each title begins with its number."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parents[3] / "docs" / "adr"


def test_numbers() -> None:
    pages = sorted(FOLDER.glob("*.md"))
    assert [int(page.name[:4]) for page in pages] == list(range(1, len(pages) + 1))
    for number, page in enumerate(pages, 1):
        assert page.read_text().startswith(f"# {number}. "), page.name
