"""Test names in pages, decisions, CONTRIBUTING.md and the README."""

import ast
import json
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main

from tandem.clusterctl.main import app
from tandem.controlplane.model_catalog import DEFAULT

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


FOLDER = Path(__file__).parents[3] / "docs" / "adr"


def test_numbers() -> None:
    pages = sorted(FOLDER.glob("*.md"))
    assert [int(page.name[:4]) for page in pages] == list(range(1, len(pages) + 1))
    for number, page in enumerate(pages, 1):
        assert page.read_text().startswith(f"# {number}. "), page.name


PAGE = (ROOT / "CONTRIBUTING.md").read_text()
STEPS = re.findall(r"^\d\. (.*(?:\n   .*)*)", PAGE.split("## Path of a request")[1].split("\n## ")[0], re.MULTILINE)


def test_it_is_one_page() -> None:
    assert len(PAGE.splitlines()) <= 120
    assert max(map(len, PAGE.splitlines())) <= 120


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.split("**")[1])
def test_a_step_names_files_of_its_packages(step: str) -> None:
    """Short paths are meant from a package that the step has named before with a whole path."""
    packages: list[Path] = []
    for name in re.findall(r"`([\w/]+\.py)`", step):
        if whole := re.match(r"(\w+/tandem/\w+)/", name):
            packages.append(ROOT / whole[1])
            assert (ROOT / name).is_file(), name
        else:
            assert any((package / name).is_file() for package in packages), name
    assert packages


def test_there_are_eight_steps() -> None:
    assert len(STEPS) == 8


README = (ROOT / "README.md").read_text()


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def _commands() -> list[list[str]]:
    lines = [line for block in _blocks("bash") for line in block.replace("\\\n", " ").splitlines()]
    shown = [line[2:] for line in "\n".join(_blocks("console")).replace("\\\n", " ").splitlines() if line[:2] == "$ "]
    return [shlex.split(line) for line in lines + shown if line.strip() and not line.startswith("#")]


def test_the_first_screen_has_the_picture_two_commands_with_their_output_and_what_was_measured() -> None:
    screen = README.partition("\n## ")[0]
    assert len(screen.splitlines()) < 70
    marks = [
        "```mermaid",
        "$ make serve\n ",
        "$ curl",
        '{"id":',
        "The capital of France is Paris.",
        "| 1 client: time to first token, p50 |",
        "`make bench NAME=peers`",
    ]
    assert sorted(marks, key=screen.index) == marks
    assert "make test" in _blocks("bash")[0]


def test_every_command_is_looked_at() -> None:
    """Those of make and clusterctl in test_pages.py, curl here."""
    assert {Path(words[0]).name for words in _commands()} == {"make", "clusterctl", "curl"}


def test_curl_asks_the_model_of_make_serve() -> None:
    for words in (words for words in _commands() if words[0] == "curl"):
        assert json.loads(words[words.index("-d") + 1])["model"] == DEFAULT.name
        assert any(word.startswith("http://127.0.0.1:8000/v1/") for word in words)


def test_python_blocks_are_python() -> None:
    for block in _blocks("python"):
        ast.parse(block)


@pytest.mark.parametrize("target", sorted({"serve", "test", "check", "proto", "bench", "proof", "train", "clean"}))
def test_every_make_target_says_what_it_does(target: str) -> None:
    assert re.search(rf"^{target}:.*## \w", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
