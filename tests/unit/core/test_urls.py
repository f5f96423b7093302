"""URLs as they may be shown."""

from __future__ import annotations

import pytest

from tandem.core.urls import redacted


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://user:geheim@host:6379/0?password=geheim", "redis://host:6379/0"),
        ("unix:///run/redis.sock?password=geheim", "unix:///run/redis.sock"),
        ("redis://:geheim@[::1", "the given URL"),
        ("redis://:geheim@[::1]:6379/0", "redis://[::1]:6379/0"),
        ("geheim", "the given URL"),
    ],
)
def test_urls_are_shown_without_secrets(url: str, shown: str) -> None:
    assert redacted(url) == shown
