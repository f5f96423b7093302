"""The model that talks, for tests that are about it: fetched once for all runs, into the cache of this user."""

import functools
import os
from pathlib import Path

import pytest

from tandem.controlplane.model_catalog import SMOLLM2
from tandem.controlplane.model_download import pull
from tandem.core.errors import UnavailableError


@functools.cache
def fetched() -> tuple[Path | None, str]:
    """Return its file, or None and the reason why it cannot be had here."""
    try:
        return pull(SMOLLM2, Path(os.environ["XDG_CACHE_HOME"]) / "tandem" / "test-models"), ""
    except UnavailableError as error:
        return None, error.message


def smollm2() -> Path:
    """Return its file; the test is skipped, with the reason, where it cannot be had."""
    file, why = fetched()
    if file is None:
        pytest.skip(why)
    return file
