"""Checks of a command's output files, before the work begins."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from tandem.core.errors import ConfigError

PICTURES = (".svg", ".png", ".pdf")


def check(flag: str, path: Path) -> None:
    """Raise ConfigError if no file can be written there."""
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{flag} is {path}", why="there is no such folder", todo="Make it")
    if path.is_dir():
        raise ConfigError(f"{flag} is {path}", why="that is a folder", todo="Name a file")


def check_picture(flag: str, path: Path) -> None:
    """Run `check`; ConfigError too if the name's ending is none of a picture, or no plotting library is there."""
    if path.suffix not in PICTURES:
        raise ConfigError(f"{flag} is {path.name!r}", todo=f"Use a name that ends in {', '.join(PICTURES)}")
    check(flag, path)
    if find_spec("matplotlib") is None:
        raise ConfigError(
            "pictures cannot be drawn", why="matplotlib is not installed", todo="pip install 'tandem-serve[cluster]'"
        )
