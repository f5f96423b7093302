"""The text that prompts are cut from: a fixed copy of pages of this project's documentation, so that figures of two
commits are about the same words. Not a benchmark itself."""

from __future__ import annotations

import hashlib

from bench.report import ROOT

_FILE = ROOT / "bench" / "pages.txt"


def text() -> str:
    """English about computers, with tables and code in it."""
    return _FILE.read_text(encoding="utf-8")


def digest() -> str:
    """Names the text in results."""
    return hashlib.sha256(_FILE.read_bytes()).hexdigest()[:16]
