"""The level of CPU that a case needs, by name, and fixtures of its threads.

A case that needs more than this process may use is skipped; on a CPU that has the level, missing code is a failure and
no reason to skip.
"""

import shutil
from typing import Any

import pytest
import torch

from tandem.core.cpu_level import CpuLevel, cpu_level
from tandem.kernels.cpu_library import CpuLibrary

HAS_COMPILER = any(map(shutil.which, ("cc", "gcc", "clang")))


def needs(level: CpuLevel) -> pytest.MarkDecorator:
    """Skips a test where the CPU, or what `TANDEM_CPU_LEVEL` leaves of it, has not got the level."""
    return pytest.mark.skipif(not has(level), reason=missing(level))


def require(level: CpuLevel) -> None:
    """Skips a running test in the same way, where its parameters decide which level it needs."""
    if not has(level):
        pytest.skip(missing(level))


def has(level: CpuLevel) -> bool:
    return HAS_COMPILER and cpu_level() >= level


def missing(level: CpuLevel) -> str:
    return f"needs a C compiler and a CPU with {level.label}; this one may use {cpu_level().label}"


def paths_of(library: CpuLibrary, *levels: CpuLevel) -> list[str]:
    """Names of the paths of `library` for those of `levels` that are there; all of them must be."""
    names = [level.label for level in levels if has(level)]
    assert all(map(library.choose_path, names)), (names, cpu_level())
    library.choose_path("")
    return names


def threads_of(*counts: int, autouse: bool = False) -> Any:
    """A fixture: its tests run on each of these numbers of torch's threads. Another one restores the number."""

    @pytest.fixture(params=counts, autouse=autouse)
    def threads(request: pytest.FixtureRequest) -> int:
        torch.set_num_threads(request.param)
        return int(request.param)

    return threads
