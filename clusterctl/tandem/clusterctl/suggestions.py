"""Suggestions for wrong usage: the nearest known name, and the error in one line."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

_NOT_ONE_OF = re.compile(r"(?P<given>'[^']*') is not one of (?P<choices>.*)\.", re.DOTALL)


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return a suggestion such as "Did you mean 'status'?"; "" if nothing is near."""
    near = get_close_matches(given, list(known), n=3, cutoff=0.6)
    return f"Did you mean {' or '.join(map(repr, near))}?" if near else ""


def usage_line(error: Any) -> str:
    """Return a usage error of typer in one line: what is wrong, the nearest known name, where the help is."""
    message = " ".join(str(getattr(error, "message", "")).split())
    text, hint = message.rstrip("."), ""
    if match := _NOT_ONE_OF.search(message):
        text = f"{_name_of(error)}{match['given']}, which is not one of {match['choices']}"
        hint = did_you_mean(match["given"].strip("'"), re.findall(r"'([^']*)'", match["choices"]))
    elif given := getattr(error, "option_name", ""):
        context = getattr(error, "ctx", None)
        flags = [flag for parameter in context.command.params for flag in parameter.opts] if context else []
        hint = did_you_mean(given, [*flags, "--help"]) if text.startswith("No such option") else ""
    elif "Did you mean" in message:  # a command: typer has looked already
        text, _, near = message.partition(". Did you mean ")
        hint = f"Did you mean {near.replace(', ', ' or ')}"
    else:
        text = " ".join(error.format_message().split()).rstrip(".")
    path = error.ctx.command_path if getattr(error, "ctx", None) is not None else "clusterctl"
    text = text if text[:2].isupper() else f"{text[0].lower()}{text[1:]}"
    return f"{text}. {hint} See `{path} --help`.".replace(".  ", ". ")


def _name_of(error: Any) -> str:
    """Such as "--output is "."""
    parameter = getattr(error, "param", None)
    if parameter is None:
        return ""
    return f"{max(parameter.opts, key=len) if parameter.param_type_name == 'option' else parameter.metavar} is "
