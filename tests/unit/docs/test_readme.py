"""The README's commands exist, its flags are real, its JSON is JSON, its links lead somewhere. e2e runs them."""

from __future__ import annotations

import ast
import json
import re
import shlex
from pathlib import Path

import pytest
import typer.main

from tandem.clusterctl.main import app

ROOT = Path(__file__).resolve().parents[3]
README = (ROOT / "README.md").read_text()
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def _commands() -> list[list[str]]:
    lines = [line for block in _blocks("bash") for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line) for line in lines if line.strip() and not line.startswith("#")]


def _options(command: str) -> set[str]:
    group = typer.main.get_command(app)
    parameters = group.commands[command].params  # type: ignore[attr-defined]
    return {option for parameter in parameters for option in (*parameter.opts, *parameter.secondary_opts)}


COMMANDS = _commands()


def test_the_readme_starts_with_two_commands() -> None:
    assert [block.strip() for block in _blocks("bash") if block.strip().startswith("make")][:2] == [
        "make serve",
        "make test",
    ]


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words)[:40])
def test_every_command_exists(words: list[str]) -> None:
    program = Path(words[0]).name
    if program == "make":
        assert words[1] in TARGETS
        for assignment in words[2:]:
            name, _, value = assignment.partition("=")
            assert name in ("ARGS", "NAME", "OUT")
            if (words[1], name) == ("serve", "ARGS"):
                assert {flag for flag in shlex.split(value) if flag.startswith("--")} <= _options("up")
    elif program == "clusterctl":
        assert {flag for flag in words[2:] if flag.startswith("-")} <= _options(words[1])
    elif program == "curl":
        body = words[words.index("-d") + 1]
        assert json.loads(body)["model"] == "tandem-tiny"
        assert any(word.startswith("http://127.0.0.1:8000/v1/") for word in words)
    else:
        pytest.fail(f"nobody checks {program}")


def test_python_blocks_are_python() -> None:
    for block in _blocks("python"):
        ast.parse(block)


def test_flags_in_the_text_are_real() -> None:
    named = set(re.findall(r"`clusterctl (\w+) [^`]*?(--[a-z-]+)", README))
    for command, flag in named:
        assert flag in _options(command) | {"--help"}, flag
    alone = set(re.findall(r"`(--[a-z-]+)`", README))
    assert alone <= _options("up") | _options("status") | {"--help"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("target", sorted({"serve", "test", "check", "proto", "bench", "proof", "train", "clean"}))
def test_every_make_target_says_what_it_does(target: str) -> None:
    assert re.search(rf"^{target}:.*## \w", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
