"""Checks of this machine: limits, memory, disk, CPU, compiler, settings of Ray and the hub."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.clusterctl.doctor.findings import Check, Finding, error, ok, size, skipped, warning
from tandem.core.cpu_level import ENVIRONMENT_VARIABLE, CpuLevel, cpu_level, machine_level, product_words
from tandem.core.errors import ConfigError

_TOO_FEW_FILES, _FEW_FILES = 1024, 4096
"""Connections of clients, workers and transfers are descriptors."""
_LITTLE_SHARED_BYTES = 64 << 20
_FULL_BYTES, _NEARLY_FULL_BYTES = 64 << 20, 1 << 30
_COMPILERS = ("cc", "gcc", "clang")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Inputs of the checks: the environment's `variables`, where clusters keep their state, where shared memory is."""

    variables: Mapping[str, str]
    state_root: Path
    shared_memory: Path = Path("/dev/shm")  # noqa: S108 - it is only read, never written

    def checks(self) -> Sequence[tuple[str, Check]]:
        return (
            ("open-files", self.open_files),
            ("shared-memory", self.shared),
            ("disk", self.disk),
            ("cpu", self.cpu),
            ("compiler", self.compiler),
            ("redis-server", self.redis_server),
            ("ray-auth", self.ray_auth),
        )

    def open_files(self) -> Iterator[Finding]:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY and soft < _FEW_FILES:
            most = 65536 if hard == resource.RLIM_INFINITY else max(_FEW_FILES, min(hard, 65536))
            fix = f"`ulimit -n {most}` before `up`, or LimitNOFILE= of its unit"
            say = error if soft < _TOO_FEW_FILES else warning
            yield say(f"a process may open {soft} files; every connection is one", fix)
        else:
            yield ok(f"a process may open {'any number of' if soft < 0 else soft} files")

    def shared(self) -> Iterator[Finding]:
        if not self.shared_memory.is_dir():
            yield error(f"there is no {self.shared_memory}", f"mount a tmpfs at {self.shared_memory}")
            return
        found = os.statvfs(self.shared_memory)
        room = found.f_blocks * found.f_frsize
        if room < _LITTLE_SHARED_BYTES:
            fix = f"`mount -o remount,size=1G {self.shared_memory}`, or --shm-size of the container"
            yield error(f"{self.shared_memory} holds {size(room)}", fix)
        else:
            yield ok(f"{self.shared_memory} holds {size(room)}")

    def disk(self) -> Iterator[Finding]:
        place = next(path for path in (self.state_root, *self.state_root.parents) if path.exists())
        free = shutil.disk_usage(place).free
        what = f"{size(free)} are free for the state in {self.state_root}"
        fix = "make room, or choose another --state-dir"
        if free < _FULL_BYTES:
            yield error(what, fix)
        elif free < _NEARLY_FULL_BYTES:
            yield warning(what, fix)
        else:
            yield ok(what)

    def cpu(self) -> Iterator[Finding]:
        try:
            level = cpu_level(self.variables)
        except ConfigError as found:
            yield error(f"{found.what}: {found.why}", found.todo)
            return
        held = "" if level == machine_level() else f" ({ENVIRONMENT_VARIABLE}: it has {machine_level().label})"
        if level is CpuLevel.NONE:
            fix = "use an x86 CPU with AVX2, or a GPU"
            yield warning(f"matrix products: {product_words(level)}{held}", fix)
        else:
            yield ok(f"matrix products: {product_words(level)}{held}")

    def compiler(self) -> Iterator[Finding]:
        if self.variables.get("TANDEM_NATIVE") == "0":
            yield warning("TANDEM_NATIVE=0: compiled code is not used", "unset it: Python and torch are slower")
            return
        path = self.variables.get("PATH", os.defpath)
        found = next((found for name in _COMPILERS if (found := shutil.which(name, path=path))), None)
        if found is None:
            what = f"none of {', '.join(_COMPILERS)} is on PATH: checksums, hashes and attention on CPU run slower"
            yield warning(what, "install one, such as `apt-get install gcc libc6-dev`")
        else:
            yield ok(found)

    def redis_server(self) -> Iterator[Finding]:
        from tandem.statestore.embedded_redis import find_server

        yield ok(str(find_server()))

    def ray_auth(self) -> Iterator[Finding]:
        """Check for stray tokens: with one, Ray 2.60 turns authentication on, and refuses others after 20 s."""
        mode = self.variables.get("RAY_AUTH_MODE", "").lower()
        given = self.variables.get("RAY_AUTH_TOKEN", "") or self.variables.get("RAY_AUTH_TOKEN_PATH", "")
        path = self.variables.get("RAY_AUTH_TOKEN_PATH", "")
        home = Path(self.variables.get("HOME", "~")).expanduser()
        token = home / ".ray" / "auth_token"
        if mode == "token" and path and not Path(path).is_file():
            yield error(f"RAY_AUTH_TOKEN_PATH is {path}, and no file is there", "correct it, or unset it")
        elif mode == "token" and not given and not token.is_file():
            fix = f"set RAY_AUTH_TOKEN_PATH, or put the cluster's token into {token}"
            yield error("RAY_AUTH_MODE is token, and there is no token", fix)
        elif mode != "token" and (given or token.is_file()):
            where = "RAY_AUTH_TOKEN is set" if given else f"{token} is there"
            what = f"{where}, so a head that starts here wants tokens, and RAY_AUTH_MODE is {mode or 'not set'}"
            yield error(what, "set RAY_AUTH_MODE=token on every machine, or remove the token")
        elif mode:
            yield ok(f"RAY_AUTH_MODE is {mode}")
        else:
            yield skipped("Ray was not set up here")
