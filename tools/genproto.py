"""Generate `protogen/` from `proto/`; `--check` fails when the committed stubs differ from fresh ones."""

from __future__ import annotations

import argparse
import filecmp
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "proto"
STUBS = ROOT / "protogen"


def generate(out: Path) -> None:
    """Write message, type and gRPC stubs for every .proto file below `out`."""
    protos = sorted(str(p.relative_to(SOURCES)) for p in SOURCES.rglob("*.proto"))
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{SOURCES}", f"--python_out={out}"]
    command += [f"--mypy_out=quiet:{out}", f"--mypy_grpc_out=quiet:{out}", f"--grpc_python_out={out}"]
    plugin_path = Path(sys.executable).parent
    env = {"PATH": f"{plugin_path}:/usr/bin:/bin"}
    subprocess.run([*command, *protos], check=True, cwd=SOURCES, env=env)


def differing(fresh: Path, stubs: Path) -> tuple[list[str], list[str]]:
    """Names that `stubs` lacks or has with other content, and those that are no longer generated."""
    names = {str(path.relative_to(fresh)) for path in fresh.rglob("*.py*")}
    there = {str(path.relative_to(stubs)) for path in stubs.rglob("*_pb2*.py*") if "__pycache__" not in path.parts}
    _, changed, missing = filecmp.cmpfiles(fresh, stubs, sorted(names), shallow=False)
    return sorted([*changed, *missing]), sorted(there - names)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only, change nothing")
    is_checking = parser.parse_args().check
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder)
        generate(fresh)
        stale, orphaned = differing(fresh, STUBS)
        if not is_checking:
            sync(fresh, STUBS, stale, orphaned)
            return 0
    if stale or orphaned:
        names = "\n  ".join(stale + orphaned)
        sys.stderr.write(f"protogen/ is not what proto/ generates; run `make proto`:\n  {names}\n")
    return 1 if stale or orphaned else 0


def sync(fresh: Path, stubs: Path, stale: list[str], orphaned: list[str]) -> None:
    """Make `stubs` equal to the fresh ones."""
    for name in stale:
        (stubs / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(fresh / name, stubs / name)
    for name in orphaned:
        (stubs / name).unlink()


if __name__ == "__main__":
    sys.exit(main())
