"""Ends processes for certain: all of our process group, or all that descend from us, also those left by a parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.02
_WAIT_S = 5.0


def adopt_descendants() -> None:
    """Make orphaned descendants children of ours, not of init, so that `descendants` finds them. Linux."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def descendants() -> set[int]:
    """Return process ids of all that descend from this process and still run."""
    parents = {pid: parent for pid, parent, _, state in _processes() if state not in "ZX"}
    found: set[int] = set()
    newest = {os.getpid()}
    while newest:
        newest = {pid for pid, parent in parents.items() if parent in newest} - found
        found |= newest
    return found


def end_descendants(*, except_for: set[int] | None = None) -> None:
    """Send SIGKILL to all descendants, until none is left."""
    ends_s = time.monotonic() + _WAIT_S
    while (left := descendants() - (except_for or set())) and time.monotonic() < ends_s:
        _kill(left)
        reap(except_for or set())
        time.sleep(_POLL_S)
    reap(except_for or set())


def end_group() -> None:
    """Send SIGKILL to every other process of our group, until none is left."""
    group, ends_s = os.getpgrp(), time.monotonic() + _WAIT_S
    while time.monotonic() < ends_s:
        left = {pid for pid, _, found, state in _processes() if found == group and state not in "ZX"} - {os.getpid()}
        if not left:
            return
        _kill(left)
        time.sleep(_POLL_S)


def reap(but: set[int]) -> None:
    """Take the exit codes of adopted children that have ended, but not of those in `but`, which other code waits
    for."""
    ours = os.getpid()
    for pid, parent, _, state in _processes():
        if parent == ours and state == "Z" and pid not in but:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def _kill(pids: set[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _processes() -> list[tuple[int, int, int, str]]:
    """Return (process id, parent, group, state) of all processes."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            text = (entry / "stat").read_text()
        except OSError:
            continue
        state, parent, group = text[text.rindex(")") + 2 :].split()[:3]  # the name before it may hold anything
        found.append((int(entry.name), int(parent), int(group), state))
    return found
