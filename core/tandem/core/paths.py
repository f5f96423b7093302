"""Expands and checks paths given by users."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tandem.core.errors import ConfigError


def expand_user(given: str | Path) -> Path:
    """`given` with the home for a leading `~` or `~name`. Raises ConfigError if there is no such user."""
    try:
        return Path(given).expanduser()
    except RuntimeError as error:
        what, home = str(given)[:80], Path(given).parts[0][:80]
        raise ConfigError(
            f"cannot find {what}", why=f"{home} is nobody's home", todo="Give the path in full"
        ) from error


def unwritable(given: str | Path) -> str:
    """Why `given` cannot be handed to other processes as UTF-8, and opened there; "" = it can.

    Bytes of the command line and of names of files that the locale cannot read come as lone surrogates.
    """
    text, wrong_locale = str(given), f"this locale has {sys.getfilesystemencoding()}: set LC_ALL=C.UTF-8"
    try:
        text.encode()
    except UnicodeEncodeError:
        try:
            os.fsencode(text).decode()
        except UnicodeError:
            return "that is no UTF-8 text"
        return wrong_locale
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return wrong_locale
    return ""
