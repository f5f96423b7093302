"""docs/index.md against the code: metrics and bounds."""

import re
from pathlib import Path

import pytest

from tandem.core import metric_names
from tandem.core.config import RouterSection
from tandem.statestore.index import publisher, replica, speculation

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "docs" / "index.md").read_text()


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(tandem_\w+)`", TEXT))))
def test_every_metric_exists(name: str) -> None:
    assert name in vars(metric_names).values()


def test_bounds_are_those_of_the_code() -> None:
    assert RouterSection().index_memory_bytes == replica.DEFAULT_MAX_BYTES == 512 * 1024 * 1024
    assert f"{speculation.MAX_BLOCKS:,} blocks" in TEXT
    assert f"{speculation.PENDING_S:g} s" in TEXT
    assert f"| {speculation.SETTLED_S:g} s later" in TEXT
    assert f"{publisher.STREAM_ENTRIES:,} entries" in TEXT
    assert f"{publisher.INDEX_TTL_S:g} s without their worker" in TEXT
