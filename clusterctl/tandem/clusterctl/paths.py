"""Where clusters of this machine keep what is theirs; without the HTTP that talking to one takes."""

from __future__ import annotations

from tandem.controlplane.environment import Environment
from tandem.controlplane.state_dir import StateDir
from tandem.core.paths import written_out


def find_state(name: str, state_dir: str) -> StateDir:
    """The state directory of cluster `name`; `state_dir` "" = where the environment says."""
    root = written_out(state_dir).absolute() if state_dir else Environment.read().state_root
    return StateDir(root, name)
