"""A program that prints all that a process inherits or is given: `python -m tests.integration.plugins.start_probe
…`."""

import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any


def seen() -> dict[str, Any]:
    return {
        "argv": sys.argv[1:],
        "program": Path(sys.argv[0]).name,
        "original": sys.orig_argv,
        "path": sys.path,
        "name": __name__,
        "folder": os.getcwd(),
        "parent": os.getppid(),
        "is leader": (os.getpgid(0) == os.getpid(), os.getsid(0) == os.getpid()),
        "group": os.getpgid(0) if os.getpgid(0) != os.getpid() else 0,
        "command line": Path("/proc/self/cmdline").read_text(errors="surrogateescape"),
        "environment in /proc": sorted(Path("/proc/self/environ").read_text(errors="surrogateescape").split("\0")),
        "environment": dict(os.environ),
        "descriptors": [number for number in range(64) if Path(f"/proc/self/fd/{number}").exists()],
        "streams": {name: about(getattr(sys, name)) for name in ("stdin", "stdout", "stderr")},
        "read": sys.stdin.read(),
        "ignored": [n for n in signal.valid_signals() if signal.getsignal(n) is signal.SIG_IGN],
        "default": [n for n in signal.valid_signals() if signal.getsignal(n) is signal.SIG_DFL],
        "blocked": [*signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        "limits": [resource.getrlimit(n) for n in (resource.RLIMIT_NOFILE, resource.RLIMIT_AS, resource.RLIMIT_CORE)],
        "mask": os.umask(0o022),
        "cores": sorted(os.sched_getaffinity(0)),
    }  # fmt: skip


def about(stream: Any) -> list[object]:
    return [
        stream.encoding, stream.errors, stream.line_buffering, stream.write_through, stream.isatty(), stream.mode
    ]  # fmt: skip


def main() -> None:
    found = seen()
    print(json.dumps(found), end="")
    print("said to stderr", file=sys.stderr)
    if "--raise" in sys.argv:
        raise ValueError("as asked")
    if "--kill" in sys.argv:
        os.kill(os.getpid(), signal.SIGTERM)
    if "--interrupt" in sys.argv:
        raise KeyboardInterrupt
    if "--say" in sys.argv:
        sys.exit("as asked")
    if "--leave" in sys.argv:
        sys.exit(7)


if __name__ == "__main__":
    main()
