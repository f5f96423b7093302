"""How long silence may last before somebody counts as gone. Every party keeps to these: one that waited for less than
the others would give up who lives, one that waited for more would write to who was given up."""

from __future__ import annotations

from typing import Final

from tandem.core.patience import patient

BEAT_S: Final = 0.5
"""Everybody says something so often: to Redis, over router streams and over control channels."""
LEASE_S: Final = patient(2.5)
"""Nothing heard for so long: lapsed. A stop is to be known, and what was held given back, within 3 s."""
TOMBSTONE_S: Final = 2 * LEASE_S
"""What has ended is remembered for so long, for what is still on its way about it."""
