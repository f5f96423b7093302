"""The allocator's setting is taken by glibc; what it is worth is a matter for measurement."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from tandem.kernels.cpu_memory import keep_freed_memory


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the call is glibc's")
def test_glibc_takes_the_setting() -> None:
    code = "from tandem.kernels.cpu_memory import keep_freed_memory; raise SystemExit(not keep_freed_memory())"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(ValueError, match="keep_bytes"):
        keep_freed_memory(-1)
