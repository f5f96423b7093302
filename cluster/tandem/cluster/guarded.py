"""`python -m tandem.cluster.guarded PARENT PROGRAM …` becomes PROGRAM, which the kernel kills when PARENT dies.

The child arranges its own death before it turns into the program: code between fork and exec (`preexec_fn`) is unsafe
in a process with threads. The kernel watches the parent's *thread*, so children are started from the main thread.
"""

from __future__ import annotations

import os
import sys

from tandem.core.parentdeath import die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606 - the command comes from our own launcher
