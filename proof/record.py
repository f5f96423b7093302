"""Shared by all proofs: their results file, from which a run that was stopped goes on, and how a run ends."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from bench.report import ROOT, commit, replace_text
from tandem.core.errors import ConfigError

CUT = os.EX_TEMPFAIL
"""Exit status of a run that broke no promise and left something to do: run it again to go on."""
Entry = TypeVar("Entry")
UNKNOWN = "unknown"
"""Stands for the commit of results without one."""


class Record:
    """Results of one proof under one seed. They are kept for as long as `about`, the seed among it, is the same.

    `content` is what the file holds, to be changed in place and saved; the commits that results come from are saved
    with them.
    """

    def __init__(self, path: Path, name: str, about: Mapping[str, Any], *, is_fresh: bool = False) -> None:
        """Open the file at `path`, or begin anew. SystemExit if it is none of ours."""
        self.path, self.has_new = path.resolve(), False
        about = {"name": name, **json.loads(json.dumps(about))}
        known = {} if is_fresh else _read(self.path)
        is_same = {key: known.get(key) for key in about} == about
        self._commits: list[str] = known.pop("commits", [UNKNOWN]) if is_same else []
        self._about = about
        self.content: dict[str, Any] = {k: v for k, v in known.items() if k not in about} if is_same else {}

    def save(self) -> None:
        """Write it whole or not at all, one line an entry."""
        self.has_new = True
        now = commit() or UNKNOWN
        if now not in self._commits:
            self._commits.append(now)
        content = {**self._about, "commits": self._commits, **self.content}
        lines = [f" {json.dumps(key)}: {_in_lines(value)}" for key, value in content.items()]
        replace_text(self.path, "{\n" + ",\n".join(lines) + "\n}\n")

    def verdict(self, done: int, *, left: int = 0, broken: int = 0) -> int:
        """Print the run's result; returns its exit status. `done`: wanted results on record, of which some are
        `broken`."""
        known = f"{done} results" + (f" of commit {', '.join(self._commits)}" if self._commits else "")
        again = f"they are in {self.path}; --fresh runs them again"
        if broken:
            was_run = "" if self.has_new else f"; none was run now: {again}"
            print(f"broken promises in {broken} of {known}{was_run}")
            return 1
        if left:
            print(f"no broken promise in {known}; {left} left: run it again to go on")
            return CUT
        print(f"no broken promise in {known}" if self.has_new else f"nothing to do: {known}; {again}")
        return 0


def arguments_of(name: str, doc: str | None) -> argparse.ArgumentParser:
    """A parser with the arguments that every proof takes."""
    parser = argparse.ArgumentParser(prog=f"proof.{name}", description=doc)
    parser.add_argument("--out", type=Path, default=ROOT / "proof" / "results" / f"{name}.json")
    parser.add_argument("--fresh", action="store_true", help="forget what --out holds")
    return parser


def add_every(parser: argparse.ArgumentParser) -> None:
    """`--every`, for proofs with entries that are the same under each seed, so that some seeds can divide them."""
    parser.add_argument(
        "--every", type=_at_least_one, default=1,
        help="run only each so many-th entry, counted from the seed on: so many seeds in a row run all of them",
    )  # fmt: skip


def share(entries: Sequence[Entry], seed: int, every: int) -> Sequence[Entry]:
    """Each `every`-th of the entries, a different part of them for each of `every` seeds in a row."""
    return entries[seed % every :: every]


@contextmanager
def said_how_to_repeat(name: str, options: str) -> Iterator[None]:
    """An exception within is a broken promise: print how to repeat it alone."""
    try:
        yield
    except Exception:
        say_how_to_repeat(name, options)
        raise


def say_how_to_repeat(name: str, options: str) -> None:
    """Print how to repeat a broken promise alone."""
    print(f"again: make proof NAME={name} ARGS='{options} --fresh' OUT=build/again.json", file=sys.stderr)


def trace_path(given: Path | None, variable: str, flag: str) -> Path:
    """The file of a trace: given, or named by an environment variable. ConfigError where it is neither."""
    if given is not None:
        return given
    if named := os.environ.get(variable):
        return Path(named)
    raise ConfigError(
        "a trace is missing", why="traces are not part of this repository",
        todo=f"say ARGS='{flag} FILE' or set {variable}; docs/simulator.md says where they are",
    )  # fmt: skip


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on")
    return int(text)


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return dict(json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise SystemExit(f"{path} holds no results of a proof: {error}. Remove it, or say another --out.") from error


def _in_lines(value: Any) -> str:
    """JSON, each entry of a list or dictionary in a line of its own."""
    if isinstance(value, dict) and value:
        entries = [f"  {json.dumps(key)}: {json.dumps(entry)}" for key, entry in value.items()]
        return "{\n" + ",\n".join(entries) + "\n }"
    if isinstance(value, list) and any(isinstance(entry, dict | list) for entry in value):
        return "[\n" + ",\n".join(f"  {json.dumps(entry)}" for entry in value) + "\n ]"
    return json.dumps(value)
