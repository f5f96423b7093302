"""Give memory back between tests: what a test has made goes when it has gone, and is not left to chance.

Python looks for cycles by the number of objects, and ten engines in cycles are few objects with gigabytes.
"""

import gc
import os
from pathlib import Path

GROWTH_MIB = 256


class Memory:
    """Collects after a test that let the process grow."""

    def __init__(self) -> None:
        self._last_mib = resident_mib()

    def pytest_runtest_logfinish(self) -> None:
        """After the teardown of a test."""
        if resident_mib() > self._last_mib + GROWTH_MIB:
            gc.collect()
            self._last_mib = resident_mib()


def resident_mib() -> int:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20
