"""Paths given by users, and files that are there whole or not at all, for any reader and whenever their writer dies."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from pathlib import Path

from tandem.core.errors import ConfigError


def expand_user(given: str | Path) -> Path:
    """`given` with the home for a leading `~` or `~name`. Raises ConfigError if there is no such user."""
    try:
        return Path(given).expanduser()
    except RuntimeError as error:
        what, home = str(given)[:80], Path(given).parts[0][:80]
        raise ConfigError(f"cannot find {what}", why=f"{home} names no user", todo="Give the path in full") from error


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


def write_private(path: Path, data: bytes) -> None:
    """Write `data` to `path` with mode 0600 from the first byte, replacing a previous file in one step. OSError if it
    cannot; then the previous file is unchanged, and no other is left."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # a new file, never a link's target
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):  # it is there; some file systems cannot promise that it stays
        sync(path.parent)


def sync(path: Path) -> None:
    """Flush the bytes of a file, or the names in a folder, to disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
