"""Compiles the C code of all kernels beside its sources, as an installation does: in a checkout, and for a wheel.

Needs the standard library alone: it runs before anything is installed.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path

from tandem.kernels.native import installed, make

FOLDER = Path(__file__).resolve().parent


def sources() -> list[Path]:
    """The C file of every kernel that has one, the longest first."""
    return sorted(FOLDER.glob("*/cpu.c"), key=lambda source: -source.stat().st_size)


def install(say: Callable[[str], None]) -> list[Path]:
    """Compile missing libraries side by side, remove those of older sources, and return all that are there.

    `say` receives a message for each kernel when it is done, with the reason if it could not be compiled: its callers
    then take another path.
    """
    every, done = sources(), 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        running = {pool.submit(_install, source): source for source in every}
        for one in as_completed(running):
            done += 1
            why = one.result()
            say(f"{running[one].parent.name} ({done} of {len(every)}){f' could not be compiled: {why}' if why else ''}")
    return [library for library in map(installed, every) if library.exists()]


def _install(source: Path) -> str:
    """Return why it could not be compiled, or ""."""
    library = installed(source)
    try:
        make(source, library)
    except (OSError, subprocess.SubprocessError) as error:
        return (str(getattr(error, "stderr", None) or error).strip().splitlines() or ["it failed"])[-1]
    for old in source.parent.glob(f"{source.stem}-*.so"):
        if old != library:
            with suppress(OSError):
                old.unlink()
    return ""
