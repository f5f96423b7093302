"""The README begins with two commands, its JSON is JSON and its Python is Python. e2e runs them."""

from __future__ import annotations

import ast
import json
import re
import shlex
from pathlib import Path

import pytest

from tandem.controlplane.named_models import DEFAULT

ROOT = Path(__file__).resolve().parents[3]
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
        "| time to first token, p50 |",
        "`make bench NAME=serve`",
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
