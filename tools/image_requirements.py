"""Write what the images install, every package with its version and hash: deploy/images/requirements/*.txt.

    python -m tools.image_requirements [NAME …]

Asks the package index what the extras of pyproject.toml come to now; so run it where images are built for, with CPython
3.11 on x86-64 Linux. Nothing is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
FOLDER: Final = ROOT / "deploy" / "images" / "requirements"
TOOLS: Final = ("hatchling", "cyclonedx-bom")
"""Tools that build the wheel, and list the contents of an image."""
IMAGES: Final[Mapping[str, tuple[str, ...]]] = {
    "router": ("router", "otel"),
    "worker-cuda": ("worker",),
    "worker-cpu": ("worker",),
    "clusterctl": ("router", "cluster"),
    "ray": ("router", "otel", "worker", "cluster", "ray"),
}
"""The extras of each image."""
WITHOUT_CUDA: Final = frozenset({"worker-cpu"})
"""Images with torch from PyTorch's own index, as a build without CUDA; torch-cpu.txt has its version."""
_OF_CUDA: Final = ("torch", "triton", "nvidia-", "cuda-")


@dataclass(frozen=True, slots=True, order=True)
class Pinned:
    """One file of a package."""

    name: str
    version: str
    sha256: str

    def line(self) -> str:
        return f"{self.name}=={self.version} --hash=sha256:{self.sha256}"


def requirements(extras: Iterable[str]) -> list[str]:
    """Requirements of the project with these extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]


def resolve(wanted: Iterable[str]) -> list[Pinned]:
    """Resolve these and all their dependencies, as pip would install them now. Raises subprocess.CalledProcessError."""
    variables = {name: value for name, value in os.environ.items() if name not in ("PIP_FIND_LINKS", "PIP_INDEX_URL")}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--only-binary", ":all:"]
        command += ["--quiet", "--disable-pip-version-check", "--report", str(report), *wanted]
        subprocess.run(command, env={**variables, "PIP_CONFIG_FILE": os.devnull}, check=True)
        found: list[dict[str, Any]] = json.loads(report.read_text())["install"]
    return sorted(_pinned(each) for each in found)


def _pinned(each: Mapping[str, Any]) -> Pinned:
    about = each["metadata"]
    return Pinned(about["name"].lower(), about["version"], each["download_info"]["archive_info"]["hashes"]["sha256"])


def _write(name: str, lines: Iterable[str]) -> None:
    text = "# Written by `python -m tools.image_requirements`, for CPython 3.11 on x86-64 Linux.\n"
    (FOLDER / f"{name}.txt").write_text(text + "".join(f"{line}\n" for line in lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [*IMAGES, "tools"]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}; all, if none is named")
    names = parser.parse_args().names or known
    if unknown := sorted({*names} - {*known}):
        parser.error(f"there is no {', '.join(unknown)}; there are {', '.join(known)}")
    if sys.version_info[:2] != (3, 11) or (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise SystemExit("the images have CPython 3.11 on x86-64 Linux: run it there")
    for name in names:
        found = resolve(TOOLS if name == "tools" else requirements(IMAGES[name]))
        if name in WITHOUT_CUDA:
            [torch] = [each for each in found if each.name == "torch"]
            _write("torch-cpu", [f"torch=={torch.version}+cpu"])
            found = [each for each in found if not each.name.startswith(_OF_CUDA)]
        _write(name, (each.line() for each in found))
        sys.stdout.write(f"{name}: {len(found)} packages\n")


if __name__ == "__main__":
    main()
