"""deploy/compose.yaml: its services, and each of them as processes here, their files below a folder."""

import os
import re
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.integration.deploy.dockerfile import stages
from tests.integration.deploy.mounting import Mounted
from tests.integration.deploy.rendering import ROOT

FILE = ROOT / "deploy" / "compose.yaml"
COMPOSE: dict[str, Any] = yaml.safe_load(FILE.read_text())
CONFIG: dict[str, Any] = tomllib.loads((FILE.parent / "compose" / "cluster.toml").read_text())
TARGETS = {"tandem-router": "router", "tandem-worker": "worker-cuda", "tandem-clusterctl": "clusterctl"}
_UNITS_S = {"s": 1, "m": 60, "h": 3600}


def seconds(duration: str) -> float:
    """Parse a duration as Compose writes it."""
    return float(sum(int(count) * _UNITS_S[unit] for count, unit in re.findall(r"(\d+)([smh])", duration)))


@dataclass(frozen=True)
class Service:
    """One of compose.yaml."""

    name: str

    @property
    def spec(self) -> dict[str, Any]:
        return dict(COMPOSE["services"][self.name])

    @property
    def target(self) -> str:
        """Of the Dockerfile; "" for an image that is not ours."""
        return TARGETS.get(self.spec["image"].split(":")[0], "")

    @property
    def command(self) -> list[str]:
        """All that it runs: the image's entrypoint, unless it has another one, and its command."""
        begin = self.spec.get("entrypoint") or stages()[self.target].entrypoint()
        return [*begin, *self.spec.get("command", ())]

    @property
    def hook(self) -> list[str]:
        """The command that is run before it is stopped."""
        [hook] = self.spec["pre_stop"]
        return list(hook["command"])

    def files(self) -> dict[str, Path]:
        """Configuration and secrets: where they are in the container, and which file here that is."""
        found = {}
        for kind in ("configs", "secrets"):
            for each in self.spec.get(kind, ()):
                found[each["target"]] = FILE.parent / COMPOSE[kind][each["source"]]["file"]
        return found


SERVICES = [Service(name) for name in COMPOSE["services"]]
OURS = [each for each in SERVICES if each.spec.get("command", [""])[0] in ("router", "worker")]


def service(name: str) -> Service:
    return next(each for each in SERVICES if each.name == name)


@dataclass(frozen=True)
class Placed(Mounted):
    """A service's file system below a folder, and its Python. `--flag=/path` is a path, too."""

    python: str = sys.executable

    def command(self, words: list[str]) -> list[str]:
        return [self.python if words[0] == "python" else words[0], *map(self.here, words[1:])]

    def here(self, word: str) -> str:
        flag, equals, value = word.partition("=")
        return f"{flag}={super().here(value)}" if equals else super().here(word)


def placed(folder: Path, each: Service, secrets: Mapping[str, str], python: str = sys.executable) -> Placed:
    """With its configuration and these secrets; the paths that it may write to are there and empty."""
    for path in ("run/tandem", "var/cache/tandem", "models"):
        (folder / path).mkdir(parents=True)
    for target, source in each.files().items():
        there = Path(f"{folder}{target}")
        there.parent.mkdir(parents=True, exist_ok=True)
        there.write_text(secrets[source.name] if source.parent.name == "secrets" else source.read_text())
    return Placed(folder, {}, python)


def variables(each: Service, place: Placed) -> dict[str, str]:
    """The environment that it gets, on top of ours."""
    given = {name: place.here(value) for name, value in each.spec.get("environment", {}).items()}
    return {**os.environ, **given, "HOME": place.here("/var/cache/tandem")}
