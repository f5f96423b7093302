"""Reads the operator's environment, the only place that does, and makes that of child processes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tandem.controlplane.model_catalog import MODELS_DIR
from tandem.core.errors import ConfigError
from tandem.core.files import unwritable
from tandem.engine.memory_plan import free_host_bytes

LOG_FORMAT = "TANDEM_LOG_FORMAT"
_WISHES = {
    # gRPC's C library reports every closed stream at its default level, whichever side closed it.
    "GRPC_VERBOSITY": "ERROR",
    # Pages of 2 MiB from the first touch on, where the system leaves that to processes: 2 GiB of weights pack in half
    # the time of first touching half a million small pages and then moving them together.
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    # About 0.2 ms of waiting awake for the next part of a step, then asleep ("passive" alone sleeps at once): a step of
    # a small model has hundreds of parts, and each sleep costs a wake-up.
    "GOMP_SPINCOUNT": "20000",
    # A child has no terminal: at a `breakpoint()` in its code, pdb would end it.
    "PYTHONBREAKPOINT": "tandem.core.breakpoints.stand",
}
"""Defaults for variables that the operator has not set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The environment's content: where state and sockets go, how many cores there are, the variables of children."""

    state_root: Path
    socket_root: Path
    cores: int
    variables: Mapping[str, str]
    free_bytes: int = 0
    """Free memory of this machine or container, in bytes; 0 = unknown."""
    models_root: Path | None = None
    """Folder of models fetched by name, for all clusters of this user; None = nowhere."""

    @classmethod
    def read(cls, variables: Mapping[str, str] | None = None) -> Environment:
        """Read `variables`, by default those of this process.

        State: TANDEM_STATE_DIR, else `tandem` below XDG_STATE_HOME, else below ~/.local/state. Models:
        TANDEM_MODELS_DIR, else `tandem/models` below XDG_DATA_HOME, else below ~/.local/share.
        """
        found = dict(os.environ if variables is None else variables)
        return cls(
            state_root=_state_root(found),
            socket_root=_socket_root(found.get("XDG_RUNTIME_DIR", "")),
            cores=len(os.sched_getaffinity(0)),
            variables=found,
            free_bytes=free_host_bytes() or 0,
            models_root=_models_root(found),
        )

    def for_child(self, *, threads: int) -> dict[str, str]:
        """Return variables of a child that computes with `threads` threads and leaves idle cores to its neighbours."""
        ours = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive", "PYTHONUNBUFFERED": "1"}
        return {**_WISHES, **self.variables, **ours}


NATIVE_CACHE = "TANDEM_NATIVE_CACHE"
"""Where a worker keeps compiled code, if it compiles any and its user's cache cannot be written."""


def _state_root(variables: Mapping[str, str]) -> Path:
    root = _named_root(variables)
    if why := unwritable(root):
        raise ConfigError(f"cannot keep state in {str(root)!a}", why=why, todo="Set TANDEM_STATE_DIR to another folder")
    return root


def _named_root(variables: Mapping[str, str]) -> Path:
    try:
        if given := variables.get("TANDEM_STATE_DIR"):
            return Path(given).expanduser().absolute()
        return Path(variables.get("XDG_STATE_HOME") or Path.home() / ".local" / "state").absolute() / "tandem"
    except RuntimeError as error:
        raise ConfigError(
            "cannot tell where state belongs", why=str(error), todo="Set TANDEM_STATE_DIR, or HOME"
        ) from error


def _models_root(variables: Mapping[str, str]) -> Path | None:
    """None if the user has no home: most commands want none of these models."""
    try:
        if given := variables.get(MODELS_DIR):
            root = Path(given).expanduser().absolute()
        else:
            data = variables.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
            root = Path(data).absolute() / "tandem" / "models"
    except RuntimeError:
        return None
    return None if unwritable(root) else root


_LONGEST_ROOT = 40
"""A unix socket's path has at most 107 bytes; our own part needs the rest."""


def _socket_root(runtime_dir: str) -> Path:
    """Return the root of socket folders: the user's runtime directory if it is there and short, else /tmp."""
    path = Path(runtime_dir)
    if runtime_dir and len(runtime_dir) <= _LONGEST_ROOT and path.is_dir() and os.access(path, os.W_OK):
        return path
    return Path("/tmp")  # noqa: S108 - only the root of a folder of mode 0700 with a random name
