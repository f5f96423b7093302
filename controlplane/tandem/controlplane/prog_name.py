"""Name of `clusterctl` on this machine, for messages that suggest a command."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

_NAME = "clusterctl"


def called() -> str:
    """Return `clusterctl` if it is on PATH, else the path that this process was called by (`make serve` uses one)."""
    program = sys.argv[0]
    found = shutil.which(_NAME)
    is_path = Path(program).name == _NAME and "/" in program
    if not is_path or (found is not None and Path(found).resolve() == Path(program).resolve()):
        return _NAME
    return shlex.quote(program)
