"""An environment with just those packages that an image would have, made of what is installed here."""

import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.integration.deploy.rendering import ROOT
from tools.image_requirements import requirements
from tools.package_closure import closure

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())


def environment(folder: Path, extras: Iterable[str]) -> Path:
    """Return its Python. Tandem is read from this checkout; everything else is installed by the extras."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    [site] = folder.glob("lib/python*/site-packages")
    for name in closure(requirements(extras)):
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        for top in {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(found.locate_file(top))))
    roots = [str(ROOT / root) for root in PROJECT["tool"]["hatch"]["build"]["dev-mode-dirs"]]
    (site / "tandem.pth").write_text("\n".join(roots) + "\n")
    return folder / "bin" / "python"
