"""Files that are there whole or not at all, for any reader and whenever their writer dies."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def write_private(path: Path, data: bytes) -> None:
    """Write `data` to `path` with mode 0600 from the first byte, replacing a previous file in one step. OSError if it
    cannot; then the previous file is unchanged, and no other is left."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # a new file, never a link's target
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):  # it is there; some file systems cannot promise that it stays
        sync(path.parent)


def sync(path: Path) -> None:
    """Flush the bytes of a file, or the names in a folder, to disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
