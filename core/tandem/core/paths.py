"""Paths as people write them."""

from __future__ import annotations

from pathlib import Path

from tandem.core.errors import ConfigError


def written_out(given: str | Path) -> Path:
    """`given` with the home for a leading `~` or `~name`. Raises ConfigError where that is nobody's."""
    try:
        return Path(given).expanduser()
    except RuntimeError as error:
        what, home = str(given)[:80], Path(given).parts[0][:80]
        raise ConfigError(
            f"cannot find {what}", why=f"{home} is nobody's home", todo="Give the path in full"
        ) from error
