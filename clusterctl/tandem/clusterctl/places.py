"""Where clusters of this machine keep what is theirs; without the HTTP that talking to one takes."""

from __future__ import annotations

from pathlib import Path

from tandem.cluster.environment import Environment
from tandem.cluster.state_dir import StateDir


def find_state(name: str, state_dir: str) -> StateDir:
    """The state directory of cluster `name`; `state_dir` "" = where the environment says."""
    root = Path(state_dir).expanduser().absolute() if state_dir else Environment.read().state_root
    return StateDir(root, name)
