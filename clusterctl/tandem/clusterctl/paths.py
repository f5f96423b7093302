"""Paths of this machine's clusters, without importing the HTTP client of the admin port."""

from __future__ import annotations

from tandem.controlplane.environment import Environment
from tandem.controlplane.state_dir import StateDir
from tandem.core.files import expand_user


def find_state(name: str, state_dir: str) -> StateDir:
    """Return the state directory of cluster `name`; `state_dir` "" = the environment's."""
    root = expand_user(state_dir).absolute() if state_dir else Environment.read().state_root
    return StateDir(root, name)
