"""Factor on the time that this process waits for others before it gives them up: for debuggers, which stop a process
for minutes.

`TANDEM_PATIENCE` names the factor, and children inherit it. It is read once, when this module is loaded, so that every
bound stays a constant: a program that sets it starts itself again. Every process of a cluster must have the same one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

from tandem.core.errors import ConfigError

PATIENCE_VARIABLE: Final = "TANDEM_PATIENCE"
MOST: Final = 3600.0
"""Two and a half hours of silence, for bounds of 2.5 s."""


def named_patience(variables: Mapping[str, str] = os.environ) -> float:
    """The factor that `TANDEM_PATIENCE` names; 1 if it is not set. Raises ConfigError for any other value."""
    said = variables.get(PATIENCE_VARIABLE, "")
    try:
        factor = float(said or 1)
    except ValueError:
        factor = 0.0
    if not 1 <= factor <= MOST:
        raise ConfigError(
            f"{PATIENCE_VARIABLE} is {said!r}",
            why="it multiplies the time for which silence is tolerated",
            todo=f"Use a number from 1 to {MOST:g}, or unset it",
        )
    return factor


PATIENCE: Final = named_patience()


def patient(bound: float) -> float:
    """A bound on the silence of another process, in seconds, as this process keeps to it."""
    return bound * PATIENCE
