"""A container of the chart as a process here: its files below a folder, its facts and paths filled in."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.integration.deploy.emulated import TOKEN
from tests.integration.deploy.rendering import Container, Release

FACTS = {"POD_NAME": "demo-tandem-pod-7d9f", "POD_IP": "127.0.0.1", "POD_CPUS": "3"}
"""Kubernetes' facts of a pod."""
PATHS = ("/etc/tandem/", "/run/", "/var/", "/models", "/data", "/tmp/")


@dataclass(frozen=True)
class Mounted:
    """A container's file system, below `folder`."""

    folder: Path
    facts: Mapping[str, str] = field(default_factory=lambda: FACTS)

    def here(self, word: str) -> str:
        """A word of a command, with the facts of the pod filled in and paths of the container below the folder."""
        for name, value in self.facts.items():
            word = word.replace(f"$({name})", value)
        return f"{self.folder}{word}" if word.startswith(PATHS) else word

    def command(self, words: list[str]) -> list[str]:
        """A container's command, or one of its probes and hooks."""
        program = sys.executable if words[0] == "python" else words[0]
        return [program, *map(self.here, words[1:])]

    def variables(self, each: Container) -> dict[str, str]:
        """The environment that it gets, on top of ours."""
        given = {v["name"]: self.here(v["value"]) for v in each.spec.get("env", ()) if "value" in v}
        return {**os.environ, **given}


def mounted(folder: Path, release: Release, facts: Mapping[str, str] = FACTS) -> Mounted:
    """The release's configuration and its secrets as they would be mounted."""
    for name in ("etc/tandem/config", "etc/tandem/secrets", "etc/tandem/kubernetes", "run/tandem", "var/cache/tandem"):
        (folder / name).mkdir(parents=True)
    for name, text in release.config().items():
        (folder / "etc/tandem/config" / name).write_text(text)
    for name in ("cluster-secret", "admin-key", "redis-password", "ray-token"):
        (folder / "etc/tandem/secrets" / name).write_text(f"{name} of thirty-two bytes!\n")
    (folder / "etc/tandem/secrets/otlp-headers").write_text("authorization=Bearer%20key\n")
    (folder / "etc/tandem/secrets/otlp-ca.crt").write_text("an authority\n")
    (folder / "etc/tandem/kubernetes/token").write_text(TOKEN)
    return Mounted(folder, facts)


def secrets_of(each: Container) -> set[tuple[str, str]]:
    """(Secret, key) of all that it mounts."""
    found = set()
    for volume in each.pod["volumes"]:
        direct = [{"name": volume["secret"]["secretName"], **volume["secret"]}] if "secret" in volume else []
        sources = volume.get("projected", {}).get("sources", ())
        projected = [source["secret"] for source in sources if "secret" in source]
        found |= {(one["name"], item["key"]) for one in direct + projected for item in one["items"]}
    return found
