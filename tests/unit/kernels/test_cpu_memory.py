"""The requests to the system are made; their worth is a matter for measurement."""

import ctypes
import mmap
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.kernels.cpu_memory import back, collect_into_huge_pages, keep_freed_memory, map_zeroed


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the call is glibc's")
def test_glibc_takes_the_setting() -> None:
    code = "from tandem.kernels.cpu_memory import keep_freed_memory; raise SystemExit(not keep_freed_memory())"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(ValueError, match="keep_bytes"):
        keep_freed_memory(-1)


def test_memory_in_huge_pages_keeps_its_contents_and_place() -> None:
    held = mmap.mmap(-1, 9 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    place = ctypes.addressof(ctypes.c_char.from_buffer(held))
    for at in range(0, len(held), 4096):
        held[at : at + 8] = at.to_bytes(8, "little")
    if not collect_into_huge_pages(place + 5, (8 << 20) - 7):
        pytest.skip("this system moves nothing into huge pages when asked")
    assert _mapped(place, "AnonHugePages") >= 3 * (2 << 20)
    assert all(held[at : at + 8] == at.to_bytes(8, "little") for at in range(0, len(held), 4096))


def test_what_no_page_holds_is_left_alone() -> None:
    assert not collect_into_huge_pages(1 << 21, 100), "nothing is mapped there"


def test_mapped_zeros_take_no_memory_until_they_are_backed() -> None:
    size = (9 << 20) + 5
    held = map_zeroed(size)
    place = ctypes.addressof(ctypes.c_char.from_buffer(held))
    held[4 << 20 : (4 << 20) + 6] = b"tandem"
    assert _resident_bytes(place, size) <= 4 << 20
    if not back(place, size):
        pytest.skip("this system backs nothing when asked")
    assert _resident_bytes(place, size) >= size
    assert held[4 << 20 : (4 << 20) + 6] == b"tandem"
    assert held[:100] == bytes(100)


def test_what_is_not_mapped_cannot_be_backed() -> None:
    if not back(*_room(held := map_zeroed(1))):
        pytest.skip("this system backs nothing when asked")
    del held
    with pytest.raises(OSError, match="Cannot allocate memory"):
        back(1 << 21, 100)


def _room(held: mmap.mmap) -> tuple[int, int]:
    return ctypes.addressof(ctypes.c_char.from_buffer(held)), len(held)


def _resident_bytes(place: int, size: int) -> int:
    """Bytes of the pages in memory of `size` bytes from the page at `place` on; mappings beside it do not count."""
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mincore(ctypes.c_void_p(place), ctypes.c_size_t(size), pages):
        raise OSError(ctypes.get_errno(), "mincore")
    return mmap.PAGESIZE * sum(page & 1 for page in pages)


def _mapped(place: int, field: str) -> int:
    """Bytes that /proc/self/smaps has in `field` of the mapping around `place`."""
    is_it = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_it = int(found[1], 16) <= place < int(found[2], 16)
        elif is_it and line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0
