"""A Dockerfile read into its stages, as far as ours goes: no here-documents, `\\` continues a line."""

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.integration.deploy.rendering import ROOT

IMAGES = ROOT / "deploy" / "images"


@dataclass(frozen=True)
class Stage:
    """`lines`: instruction and argument, with those of the stage that it is made of before its own."""

    name: str
    lines: list[tuple[str, str]] = field(default_factory=list)

    def all(self, instruction: str) -> list[str]:
        return [argument for name, argument in self.lines if name == instruction]

    def last(self, instruction: str) -> str:
        return self.all(instruction)[-1]

    def variables(self) -> dict[str, str]:
        """The variables that it sets for processes in it."""
        pairs = (word.partition("=") for argument in self.all("ENV") for word in shlex.split(argument))
        return {name: value for name, _, value in pairs}

    def entrypoint(self) -> list[str]:
        return list(json.loads(self.last("ENTRYPOINT")))

    def copies(self) -> Iterator[tuple[str, list[str]]]:
        """(stage or "" for the context, its paths) of each COPY."""
        for argument in self.all("COPY"):
            words = shlex.split(argument)
            source = next((word.removeprefix("--from=") for word in words if word.startswith("--from=")), "")
            yield source, [word for word in words if not word.startswith("--")][:-1]


def stages(path: Path = IMAGES / "Dockerfile") -> dict[str, Stage]:
    """Every stage by its name."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    found: dict[str, Stage] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        instruction, _, argument = line.partition(" ")
        if instruction == "FROM":
            base, _, name = argument.partition(" AS ")
            found[name] = Stage(name, list(found[base].lines) if base in found else [("FROM", base)])
        elif found:
            list(found.values())[-1].lines.append((instruction, argument.strip()))
    return found


def lets_through(path: str, ignore: Path = IMAGES / "Dockerfile.dockerignore") -> bool:
    """True if a file is in the build's context; the last pattern that matches decides."""
    is_in = True
    for pattern in filter(None, map(str.strip, ignore.read_text().splitlines())):
        if not pattern.startswith("#") and re.match(_expression(pattern.removeprefix("!")), path):
            is_in = pattern.startswith("!")
    return is_in


def _expression(pattern: str) -> str:
    """Return the expression of a pattern of .dockerignore, for a path or for one of its folders."""
    parts = re.split(r"(\*\*/|\*)", pattern)
    known = {"**/": "(.*/)?", "*": "[^/]*"}
    return "".join(known.get(part, re.escape(part)) for part in parts) + "(/|$)"
