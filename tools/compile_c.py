"""Compile the C code of the kernels into this user's cache: `PYTHONPATH=core:kernels python tools/compile_c.py`.

It needs the standard library alone, so that CI compiles while packages are installed. A machine without a compiler is
told so by whatever needs the code.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tandem.kernels.native import load

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Compile side by side what is not there; 1 if something could not be."""
    with ThreadPoolExecutor() as pool:
        return int(None in [*pool.map(load, sorted(ROOT.glob("kernels/tandem/kernels/*/cpu.c")))])


if __name__ == "__main__":
    sys.exit(main())
