"""Short temporary folders (unix sockets have short names), pairs of ranks, and the workers among which a fetch goes
wrong."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.worker.fetchcase import PROMPT
from tests.integration.worker.loopback import Loopback
from tests.integration.worker.pair import MODEL
from tests.integration.worker.trio import Trio


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="td-") as name:
        yield Path(name)


@pytest.fixture
def loopback(folder: Path) -> Iterator[Loopback]:
    """A prefill and a decode rank with the bundled model."""
    pair = Loopback(folder, MODEL, transport="shm", chunk_tokens=64)
    yield pair
    pair.close()


@pytest.fixture
def sim_loopback(folder: Path) -> Iterator[Loopback]:
    """The same with arithmetic in place of the model."""
    pair = Loopback(folder, MODEL, engine="sim", transport="shm", chunk_tokens=64)
    yield pair
    pair.close()


@pytest.fixture
def trio(folder: Path) -> Iterator[Trio]:
    """d0 holds the prompt's 37 full blocks; d1 wants them; p0 and d2 are there too."""
    made = Trio(folder, ("p0", "d0", "d1", "d2"))
    made.serve("before", PROMPT, "d0")
    yield made
    made.close()
