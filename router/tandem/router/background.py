"""Marks what a task does as background work: requests of batches, which wait for everybody else.

The mark is set around a call and seen by everything that the call does; flights carry it on.
"""

from __future__ import annotations

from contextvars import ContextVar

IS_BACKGROUND: ContextVar[bool] = ContextVar("is_background", default=False)
