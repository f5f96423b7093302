"""Checks of the inputs with which a cluster of this name is, or would be, started: settings, ports, secrets, model."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.clusterctl.doctor.findings import Check, Finding, error, ok, skipped
from tandem.controlplane.resolve import check, check_ports
from tandem.controlplane.state_dir import StateDir
from tandem.core import config_loader
from tandem.core.config import ClusterConfig
from tandem.core.errors import StartupError
from tandem.core.files import expand_user

_GATED = ("meta-llama/", "google/gemma", "mistralai/", "bigcode/starcoder", "CohereForAI/", "black-forest-labs/")
"""Prefixes of gated models: their files are given only after an agreement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigChecks:
    """`file`: a configuration to check; None = the one that the cluster was last started with, else the defaults."""

    state: StateDir
    variables: Mapping[str, str]
    file: Path | None = None

    def checks(self) -> Sequence[tuple[str, Check]]:
        return (
            ("configuration", self.configuration),
            ("ports", self.ports),
            ("secrets", self.secrets),
            ("hub-token", self.hub_token),
        )

    def config(self) -> ClusterConfig:
        """Return the configuration; raises ConfigError for a wrong file."""
        file = self.file or self.state.config_file
        return config_loader.load(file, ClusterConfig) if self.file or file.is_file() else ClusterConfig()

    def configuration(self) -> Iterator[Finding]:
        try:
            check(self.config())
        except StartupError as found:
            yield error(found.what + (f": {found.why}" if found.why else ""), found.todo or "correct it")
            return
        yield ok(str(self.file or "it goes together"))

    def ports(self) -> Iterator[Finding]:
        if self.state.is_held():
            yield skipped("the cluster runs and has its ports")
            return
        try:
            check_ports(check(self.config()))
        except StartupError as found:
            yield error(found.what + (f": {found.why}" if found.why else ""), found.todo)
            return
        yield ok("those of the API and the admin port are free")

    def secrets(self) -> Iterator[Finding]:
        files = [file for file in (self.state.admin_key_file, self.state.secret_file) if os.path.lexists(file)]
        for file in files:
            fix = f"`chmod 600 {file}`, or remove it while the cluster is down: `up` draws another"
            try:
                mode = stat.S_IMODE(file.stat().st_mode)
                is_empty = not file.read_bytes().strip()
            except OSError as failure:
                yield error(f"{file} cannot be read: {failure.strerror or failure}", fix)
                continue
            if is_empty:
                yield error(f"{file} is empty", "remove it while the cluster is down: `up` draws another")
            elif mode & 0o077:
                yield error(f"others may read {file} (mode {mode:04o})", f"`chmod 600 {file}`")
            else:
                yield ok(f"{file} is ours alone")
        if not files:
            yield skipped("none were drawn yet")

    def hub_token(self) -> Iterator[Finding]:
        config = self.config()
        names = [model.path for model in (config.model, *config.models)]
        gated = [name for name in names if name.startswith(_GATED) and not expand_user(name).exists()]
        if not gated:
            yield skipped("no model that is known to want one")
        elif self._has_token():
            yield ok(f"there is one for {', '.join(gated)}")
        else:
            fix = "agree to its terms on huggingface.co, then set HF_TOKEN, or `hf auth login`"
            yield error(
                f"{', '.join(gated)} requires agreement to its terms, and there is no token",
                fix,
            )

    def _has_token(self) -> bool:
        """True if there is a token where the hub's own library looks."""
        if any(self.variables.get(name) for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")):
            return True
        home = Path(self.variables.get("HOME", "~")).expanduser()
        cache = self.variables.get("XDG_CACHE_HOME") or str(home / ".cache")
        folder = Path(self.variables.get("HF_HOME") or f"{cache}/huggingface")
        return Path(self.variables.get("HF_TOKEN_PATH") or folder / "token").is_file()
