"""Compile the C code of the kernels beside its sources: `PYTHONPATH=core:kernels python tools/compile_c.py`.

It needs the standard library alone, so that it runs while packages are installed. Without a compiler it reports that,
and callers of the code take another path.
"""

from __future__ import annotations

import sys

from tandem.kernels.installing import install, sources


def main() -> int:
    """Compile all missing files side by side; returns 1 if one failed."""
    return int(len(install(lambda line: print(f"==> kernels: {line}", flush=True))) < len(sources()))


if __name__ == "__main__":
    sys.exit(main())
