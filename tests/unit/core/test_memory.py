"""Freed memory goes back to the system, what stays lies on huge pages, and is not walked again by collections."""

import subprocess
import sys
from pathlib import Path

import pytest

_PIECES = """
import sys
from pathlib import Path
from tandem.core.memory import return_free_memory, return_large_buffers


def resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20


return_large_buffers()
pieces = [bytes(2000) for _ in range(100_000)]
kept = bytes(2000)  # behind them: the allocator can give nothing back by itself
grown_mib = resident_mib()
del pieces
return_free_memory()
print(grown_mib - resident_mib())
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_what_is_free_between_buffers_goes_back_to_the_system() -> None:
    child = subprocess.run([sys.executable, "-c", _PIECES], capture_output=True, text=True, timeout=60, check=False)
    assert child.returncode == 0, child.stderr
    assert int(child.stdout) > 150


_HUGE_CHILD = """
import re
from pathlib import Path
from tandem.core.memory import use_huge_pages

def kb(name):
    return int(re.search(name + r": +(\\d+)", Path("/proc/self/smaps_rollup").read_text())[1])

full, empty = bytearray(b"x") * (8 << 20), bytearray(64 << 20)
before_kb = kb("Rss")
use_huge_pages()
assert set(full) == {ord("x")} and not any(empty[:: 1 << 20])
print(kb("AnonHugePages") >= 4096, kb("Rss") - before_kb < 16384)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").is_dir(), reason="this kernel has no huge pages")
def test_what_is_in_memory_goes_to_huge_pages_and_what_is_not_stays_away() -> None:
    child = subprocess.run([sys.executable, "-c", _HUGE_CHILD], capture_output=True, text=True, timeout=60, check=False)
    assert (child.returncode, child.stdout.strip()) == (0, "True True"), child.stderr


_COLLECTIONS_CHILD = """
import gc
from tandem.core.memory import freeze_gc, load_without_pauses

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
    child = subprocess.run(
        [sys.executable, "-c", _COLLECTIONS_CHILD], capture_output=True, text=True, timeout=60, check=False
    )
    assert (child.returncode, child.stdout.strip()) == (0, "ok"), child.stderr
