"""A rank with a step loop that never releases the interpreter: none of its other threads runs any more."""

import ctypes
import sys

from tandem.worker import rank
from tandem.workercore.step_loop import StepLoop


def seize(self: StepLoop) -> None:
    """In place of the loop."""
    hold = ctypes.PyDLL(None).sleep
    while True:  # a signal ends it
        hold(600)


if __name__ == "__main__":
    StepLoop.run = seize  # type: ignore[method-assign]
    sys.exit(rank.main())
