"""The text of the benches: figures of two commits have to be about the same words."""

from __future__ import annotations

from bench import pages


def test_the_text_stays_as_it_was_measured_with() -> None:
    assert pages.digest() == "9d5c5151386fe2de"
    assert len(pages.text().split()) > 8192, "long prompts repeat nothing"
