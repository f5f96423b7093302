"""Compile the C code of the kernels into this user's cache: `python tools/compile_c.py`, before anything is installed.

It needs the standard library alone, so that CI compiles while packages are installed. A machine without a compiler is
told so by whatever needs the code.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "core"), str(ROOT / "kernels")]

from tandem.kernels.native import load  # noqa: E402 - found by the path above


def main() -> int:
    """Compile side by side what is not there; 1 if something could not be."""
    with ThreadPoolExecutor() as pool:
        return int(None in [*pool.map(load, sorted(ROOT.glob("kernels/tandem/kernels/*/cpu.c")))])


if __name__ == "__main__":
    sys.exit(main())
