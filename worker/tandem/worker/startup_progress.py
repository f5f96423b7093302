"""Phases of a rank's start, as its host gets them."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tandem.core.start_times import StartPhase


class StartSteps:
    """`say` gets phases in order, one at a time. A compiler that runs in a phase is one of its own, between two parts
    of it. Thread-safe."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._lock = threading.Lock()
        self._phase: StartPhase | None = None

    def enter(self, phase: StartPhase) -> None:
        """Begin this phase and end the one before."""
        with self._lock:
            self._phase = phase
            self._say(phase)

    def note(self, text: str) -> None:
        """Report another text; the phase goes on."""
        with self._lock:
            self._say(text)

    def compile(self, is_begun: bool) -> None:
        """Report that a compiler begins; or that it has ended, and the phase goes on."""
        with self._lock:
            phase = StartPhase.COMPILING if is_begun else self._phase
            if phase is not None:
                self._say(phase)
