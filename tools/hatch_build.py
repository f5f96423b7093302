"""Compiles the kernels while the package is built: into a wheel, or beside the sources of an editable installation."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelsHook(BuildHookInterface[Any]):
    """A wheel with libraries runs on this machine's architecture and C library, or newer ones; its tag shows that."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it packs. Without a compiler the wheel has no libraries, and runs everywhere."""
        root = Path(self.root)
        sys.path[:0] = [str(root / "core"), str(root / "kernels")]
        from tandem.kernels.installing import install

        libraries = install(lambda line: self.app.display_info(f"kernels: {line}"))
        if version == "editable" or not libraries:
            return
        from packaging.tags import platform_tags

        tags = list(platform_tags())
        build_data["artifacts"] += [str(library.relative_to(root)) for library in libraries]
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{next((tag for tag in tags if tag.startswith('manylinux')), tags[0])}"
