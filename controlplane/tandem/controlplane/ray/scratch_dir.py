"""A folder below /tmp for one process while it lives: mode 0700, removed with it, swept up after `kill -9`."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

OF_AGENT, OF_RAY = "tandem-agent-", "tandem-ray-"
"""Prefixes: the folder of an agent's worker, where the sockets of its machine go, and that of Ray, in /tmp."""
_LOCK = "owner"


class OwnedFolder:
    """A new folder `<root>/<prefix>…`. Its lock shows sweepers, also those in other pid namespaces, that we live."""

    def __init__(self, prefix: str, root: Path = Path("/tmp")) -> None:  # noqa: S108 - mode 0700, a random name
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
            self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if _take(self._lock) and os.fstat(self._lock).st_nlink:
                return
            os.close(self._lock)  # a sweeper was between the two lines above

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove it with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def sweep(prefix: str, root: Path = Path("/tmp")) -> None:  # noqa: S108
    """Remove our user's folders of that prefix without a live owner."""
    for path in root.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            if path.lstat().st_uid != os.getuid():
                continue
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if _take(lock):
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


def _take(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
