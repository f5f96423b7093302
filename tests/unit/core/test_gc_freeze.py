"""Objects that a process loaded before it serves are not walked again by its garbage collections."""

from __future__ import annotations

import subprocess
import sys

import pytest

_CHILD = """
import gc
from tandem.core.gc_freeze import freeze_gc, load_without_pauses

load_without_pauses()
collections = gc.get_stats()[0]["collections"]
loaded = [[number] for number in range(20_000)]
assert gc.get_stats()[0]["collections"] == collections
rare = gc.get_threshold()[0]
freeze_gc()
assert gc.get_threshold()[0] < rare
assert gc.get_freeze_count() >= 1_000
assert not any(entry is loaded for entry in gc.get_objects())
assert gc.isenabled()


class Node: ...


dead = Node()
dead.itself = dead
import weakref

seen = weakref.ref(dead)
del dead
gc.collect()
assert seen() is None
print("ok")
"""


@pytest.mark.slow
def test_what_was_loaded_is_kept_out_of_collections_and_what_comes_later_is_collected() -> None:
    child = subprocess.run([sys.executable, "-c", _CHILD], capture_output=True, text=True, timeout=60, check=False)
    assert (child.returncode, child.stdout.strip()) == (0, "ok"), child.stderr
