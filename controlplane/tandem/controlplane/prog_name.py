"""How people call `clusterctl` here, for messages that tell them what to type next."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

_NAME = "clusterctl"


def called() -> str:
    """`clusterctl` where that is on PATH, else the path that this process was called by (`make serve` uses one)."""
    program = sys.argv[0]
    found = shutil.which(_NAME)
    is_path = Path(program).name == _NAME and "/" in program
    if not is_path or (found is not None and Path(found).resolve() == Path(program).resolve()):
        return _NAME
    return shlex.quote(program)
