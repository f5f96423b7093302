"""One folder for each cluster name: lock, secrets, context file, configurations, logs, and short-lived sockets.

<root>/<name>/lock           held while an `up` of this name runs; holds its process id
              secret         the cluster secret, mode 0600
              admin.key      the admin key, mode 0600
              context.json   where the running cluster listens
              sockets        the path of the folder for sockets, which must be short and so lies elsewhere
              config/        what each process was started with; cluster.json: what `up` was
              logs/ redis/ files/
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tandem.controlplane.environment import Environment
from tandem.controlplane.prog_name import called
from tandem.core import config_loader
from tandem.core.config import ClusterConfig
from tandem.core.errors import ConfigError, StartupError, UnavailableError
from tandem.core.files import expand_user, write_private
from tandem.core.secret import ClusterSecret

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")
_LOG_KEPT_BYTES = 8 * 1024 * 1024
_TRIES, _PAUSE_S = 5, 0.04


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """How a running cluster can be reached; `up` writes it, `status` and `down` read it."""

    name: str
    pid: int
    api: str
    grpc: str
    admin: str
    admin_key_file: str


class StateDir:
    """The folder of one cluster name. `hold` it before changing anything in it; reading needs no lock."""

    def __init__(self, root: Path, name: str) -> None:
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"{name!r} cannot be a cluster's name", todo="Use 1 to 40 letters, digits, dashes or underscores"
            )
        self.name, self.path = name, root / name
        self.secret_file = self.path / "secret"
        self.admin_key_file = self.path / "admin.key"
        self.context_file = self.path / "context.json"
        self.config_file = self.path / "config" / "cluster.json"
        self.config_dir, self.log_dir, self.redis_dir, self.files_dir = (
            self.path / part for part in ("config", "logs", "redis", "files")
        )
        self.sockets_file, self._lock_file = self.path / "sockets", self.path / "lock"

    def hold(self) -> HeldState:
        """Take the lock for as long as the result is open; StartupError when another `up` has it."""
        try:
            for folder in (self.path, self.config_dir, self.log_dir):
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = os.open(self._lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self._unusable(error) from error
        try:
            self._take(lock)
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:
            os.close(lock)
            raise self._unusable(error) from error
        except StartupError:
            os.close(lock)
            raise
        return HeldState(self, lock)

    def check_free(self) -> None:
        """Raise StartupError where `hold` would be refused now, for an `up` of this name runs."""
        if self.is_held():
            raise self._taken()

    def _take(self, lock: int) -> None:
        """Take the lock; a check (`is_held`) holds it for a moment, so one refusal does not count."""
        for _ in range(_TRIES):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                time.sleep(_PAUSE_S)
        raise self._taken()

    def _taken(self) -> StartupError:
        owner = self._lock_file.read_text(errors="replace").strip()
        return StartupError(
            f"cluster {self.name!r} is running already",
            why=f"process {owner} holds {self._lock_file}",
            todo=f"Stop it with `{called()} down --name {self.name}`, or start another with --name",
        )

    def _unusable(self, error: OSError) -> StartupError:
        why, todo = error.strerror or str(error), "Choose another with --state-dir"
        return StartupError(f"cannot use the state directory {self.path}", why=why, todo=todo)

    def is_held(self) -> bool:
        """True if an `up` of this name runs now."""
        try:
            lock = os.open(self._lock_file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(lock)
        return False

    def _others(self) -> list[str]:
        """Return names of other clusters that run beside this one."""
        root = self.path.parent
        names = sorted(one.name for one in root.iterdir() if _NAME.fullmatch(one.name)) if root.is_dir() else []
        return [name for name in names if name != self.name and StateDir(root, name).is_held()]

    def read_context(self) -> Context:
        """Return where the running cluster listens; UnavailableError when none is running, or not yet listening."""
        if not self.is_held():  # ignore what a killed `up` left here
            others = ", ".join(self._others())
            named = f"Add --name for one that runs here ({others}), start" if others else "Start"
            raise UnavailableError(
                f"no cluster {self.name!r} is running here",
                why=f"no process holds {self._lock_file}",
                todo=f"{named} one with `{called()} up`, or say where it is with --endpoint and --admin-key-file",
            )
        if not self.context_file.is_file():
            raise UnavailableError(
                f"cluster {self.name!r} is still starting", todo="Try again in a moment, or stop it with Ctrl-C"
            )
        return config_loader.load(self.context_file, Context)

    def log_file(self, member: str) -> Path:
        return self.log_dir / f"{member}.log"


def state_of(config: ClusterConfig, environment: Environment) -> StateDir:
    """Return the state directory of the configured cluster; ConfigError for an invalid name."""
    root = expand_user(config.state_dir).absolute() if config.state_dir else environment.state_root
    return StateDir(root, config.name)


class HeldState:
    """A state directory with its lock held by us. Closing removes this run's own files and releases the lock."""

    def __init__(self, state: StateDir, lock: int) -> None:
        self.state, self._lock = state, lock

    def __enter__(self) -> HeldState:
        return self

    def __exit__(self, *_: object) -> None:
        self._remove_leftovers()
        os.close(self._lock)

    def draw_secrets(self) -> ClusterSecret:
        """Return the cluster secret; it and the admin key are drawn when they are not there yet."""
        if not self.state.secret_file.exists():
            ClusterSecret.generate().save(self.state.secret_file)
        if not self.state.admin_key_file.exists():
            write_private(self.state.admin_key_file, secrets.token_urlsafe(32).encode())
        for file in (self.state.secret_file, self.state.admin_key_file):
            file.chmod(0o600)
        return ClusterSecret.load(self.state.secret_file)

    def make_socket_dir(self, root: Path) -> Path:
        """Make a folder with a short path, mode 0700, for this run's sockets; one left by a killed run is removed."""
        self._remove_leftovers()
        path = Path(tempfile.mkdtemp(prefix="tandem-", dir=root))
        write_private(self.state.sockets_file, str(path).encode())
        return path

    def write_config(self, member: str, config: object) -> Path:
        """Keep a process's configuration for it to read; private, since URLs in it may hold passwords."""
        path = self.state.config_dir / f"{member}.json"
        write_private(path, config_loader.dump(config))
        return path

    def write_context(self, context: Context) -> None:
        write_private(self.state.context_file, config_loader.dump(context))

    def rotate_logs(self) -> None:
        """Keep one older generation of each log that has grown large."""
        for log in self.state.log_dir.glob("*.log"):
            if log.stat().st_size > _LOG_KEPT_BYTES:
                log.replace(log.with_suffix(".log.1"))

    def _remove_leftovers(self) -> None:
        self.state.context_file.unlink(missing_ok=True)
        try:
            sockets = Path(self.state.sockets_file.read_text().strip())
        except OSError:
            return
        if sockets.name.startswith("tandem-") and sockets.is_dir() and sockets.stat().st_uid == os.getuid():
            shutil.rmtree(sockets, ignore_errors=True)
        self.state.sockets_file.unlink(missing_ok=True)
