"""Generate `protogen/` from `proto/`; `--check` fails when the committed stubs differ from fresh ones."""

from __future__ import annotations

import argparse
import filecmp
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only, change nothing")
    if not parser.parse_args().check:
        STUBS.mkdir(exist_ok=True)
        generate(STUBS)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder)
        generate(fresh)
        names = sorted(str(p.relative_to(fresh)) for p in fresh.rglob("*.py*"))
        committed = sorted(str(p.relative_to(STUBS)) for p in STUBS.rglob("*_pb2*.py*") if "__pycache__" not in str(p))
        _, differing, missing = filecmp.cmpfiles(fresh, STUBS, names, shallow=False)
        stale = sorted(set(differing) | set(missing) | (set(committed) - set(names)))
    if stale:
        print("protogen/ is not what proto/ generates; run `make proto`:", *stale, sep="\n  ", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
