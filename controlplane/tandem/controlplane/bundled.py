"""Location of the bundled model: `models/` of a source checkout, or `tandem/models/` of an installed wheel."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from tandem.core.errors import ModelError

NAME = "tandem-tiny"


def bundled_model() -> Path:
    """Return the folder of the bundled model; ModelError if this installation has none."""
    checkout = Path(__file__).resolve().parents[3] / "models" / NAME
    candidates = [checkout] if (checkout.parents[1] / "pyproject.toml").is_file() else []
    namespace = importlib.util.find_spec("tandem")
    for root in (namespace.submodule_search_locations or ()) if namespace else ():
        candidates.append(Path(root) / "models" / NAME)
    for candidate in candidates:
        if (candidate / "config.json").is_file():
            return candidate
    raise ModelError("the bundled model is not installed", todo="Name a model folder or hub id with --model")
