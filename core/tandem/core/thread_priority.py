"""Priorities of threads: long work in the background takes what cores are left, and no step waits for it.

For work outside the interpreter alone: a thread without a core would keep the interpreter's lock from all others.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress

NICENESS = 10


def yield_cores() -> None:
    """Lower the priority of the thread that calls it, for good. Where threads have none, nothing changes."""
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
