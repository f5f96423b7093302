"""List the programs of `bench/` or `proof/`, or run one as `python -m FOLDER.NAME` with all further arguments."""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def programs(folder: str) -> dict[str, str]:
    """Name → first line of the docstring, of every `__main__.py` below `folder`."""
    return {main.parent.name: _first_line(main) for main in sorted(ROOT.glob(f"{folder}/*/__main__.py"))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", choices=("bench", "proof"))
    parser.add_argument("name", nargs="?", default="", help="which one; without it, a list")
    parser.add_argument("--out", default="", help="where its results go")
    options, arguments = parser.parse_known_args()
    known = programs(options.folder)
    if not options.name:
        print(_listing(options.folder, known))
        return 0
    if options.name not in known:
        print(f"{options.folder}/ has no {options.name!r}. There are:", file=sys.stderr)
        print(_listing(options.folder, known), file=sys.stderr)
        return 2
    out = ["--out", options.out] if options.out else []
    command = [sys.executable, "-m", f"{options.folder}.{options.name}", *out, *arguments]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def _listing(folder: str, known: dict[str, str]) -> str:
    width = max(map(len, known), default=0)
    lines = [f"  make {folder} NAME={name:<{width}}  {line}" for name, line in known.items()]
    return "\n".join(lines) or f"  {folder}/ holds no program yet"


def _first_line(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return text.splitlines()[0] if text else ""


if __name__ == "__main__":
    sys.exit(main())
