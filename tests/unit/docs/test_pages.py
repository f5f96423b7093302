"""Names in pages and forms exist: commands of `clusterctl` and their flags, make targets, programs, paths, links."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main

from tandem.clusterctl.main import app

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "bench").rglob("*.md"),
     *(ROOT / "proof").rglob("*.md"), *(ROOT / "models").rglob("*.md"), *(ROOT / "deploy").rglob("*.md"),
     *(ROOT / ".github").rglob("*.md"), *(ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")]
)  # fmt: skip
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
FOLDERS = "|".join(
    sorted(path.name for path in ROOT.iterdir() if path.is_dir() and path.name[0] not in "._" and path.name != "build")
)
PATH = re.compile(rf"`((?:{FOLDERS})/[\w./-]+)(?::[\w.]+)?`")
CODE = "\N{SYMBOL FOR START OF TEXT}"
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def commands(text: str, program: str) -> Iterator[list[str]]:
    """Arguments of `program` wherever it is called: between backticks, or on a line of code."""
    inline = re.findall(rf"(?<!`)`(?:\.venv/bin/)?{program} ([^`]+)`(?!`)", text)
    code = re.findall(rf"^{CODE}(?:\.venv/bin/)?{program} (.+)$", text, flags=re.MULTILINE)
    for arguments in inline + code:
        words = shlex.split(arguments.replace("\n", " "), comments=True)
        yield [word for word in words if word not in ("…", "|")]


@cache
def read(page: Path) -> str:
    """The page with every line of code behind a mark: those between fences, and those indented by four."""
    lines, is_fenced = [], False
    for line in page.read_text().replace("\\\n", " ").splitlines():
        is_fence = line.startswith("```")
        is_fenced ^= is_fence
        is_code = not is_fence and (is_fenced or line.startswith("    "))
        lines.append(CODE + line.strip() if is_code else line)
    return "\n".join(lines)


def follow(words: list[str]) -> tuple[Any, list[str]]:
    """The command of `clusterctl` that `words` lead to, and what is left of them."""
    found: Any = typer.main.get_command(app)
    while words and hasattr(found, "commands"):
        assert words[0] in found.commands, f"clusterctl has no {' '.join(words)}"
        found, words = found.commands[words[0]], words[1:]
    return found, words


def options(command: Any) -> set[str]:
    """Flags of a command, and of those below it."""
    own = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
    below = getattr(command, "commands", {}).values()
    return own.union({"--help", "-h"}, *map(options, below))


def flags(words: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}


@cache
def program_flags() -> frozenset[str]:
    """Return the flags of benchmarks, proofs and tools."""
    files = [file for folder in ("bench", "proof", "tools") for file in (ROOT / folder).rglob("*.py")]
    return frozenset(flag for file in files for flag in re.findall(r'"(--[a-z-]+)"', file.read_text()))


@each_page
def test_commands_and_flags_are_real(page: Path) -> None:
    up, _ = follow(["up"])
    for section in read(page).split("\n#"):  # flags that stand alone are of a command that it names
        allowed = options(up)
        for words in commands(section, "clusterctl"):
            command, rest = follow(words)
            assert flags(rest) <= options(command), f"clusterctl {' '.join(words)}"
            allowed |= options(command)
        if page.name != "CHANGELOG.md":  # which lists all changes of one release
            alone = {flag for flag in re.findall(r"`(--[a-z-]+)[^`]*`", section) if not flag.endswith("-")}
            assert alone <= allowed | program_flags(), section


@each_page
def test_make_targets_and_programs_are_real(page: Path) -> None:
    for words in commands(read(page), "make"):
        assert words[0] in TARGETS, words
        given = dict(word.split("=", 1) for word in words[1:])
        assert set(given) <= {"ARGS", "BASE", "NAME", "OUT", "PYTHON"}, words
        if words[0] in ("bench", "proof"):
            for name in given.get("NAME", "").split("|"):
                assert name in ("", "…") or (ROOT / words[0] / name / "__main__.py").is_file(), words
        if words[0] == "serve":
            assert flags(shlex.split(given.get("ARGS", ""))) <= options(follow(["up"])[0]), words


@each_page
def test_paths_are_real(page: Path) -> None:
    text = page.read_text()
    assert [path for path in PATH.findall(text) if not (ROOT / path).exists()] == []
    assert re.findall(r"`(test_\w+\.py)", text) == [], "say in which folder"


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_what_is_looked_for_is_found() -> None:
    text = "\n".join(map(read, PAGES))
    assert len(list(commands(text, "clusterctl"))) > 20
    assert len(list(commands(text, "make"))) > 20
    assert len(set(PATH.findall(text))) > 80
    with pytest.raises(AssertionError, match="clusterctl has no statsu"):
        follow(["statsu"])
