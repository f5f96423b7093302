"""A way in which models write tool calls, as data."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tandem.router.output_formats.part_collector import PartCollector
from tandem.router.output_formats.reader import Reader, Step

Schemas = Mapping[str, Mapping[str, Any]]
"""The schemas of the parameters of all functions that may be called, by name."""
Read = Callable[[Reader, PartCollector, Schemas], Step[bool]]


def call_id() -> str:
    """A fresh id of a call, as OpenAI writes them."""
    return f"call_{secrets.token_hex(12)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallShape:
    """How calls look that a grammar lets through: `before` the first one, each `call`, `between` two, and `after` the
    last. In `call` stand $name and $arguments, which are written in the `style` "json", "python", "xml" or "gemma"."""

    call: str
    before: str = ""
    between: str = ""
    after: str = ""
    style: str = "json"
    is_parallel: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """`read` gets the text from a trigger on and reports calls; False = what it read is no call.

    `triggers` begin calls anywhere in an answer, `openings` at its beginning alone. `tags` are looked for among the
    tokens of the model: one that is a token counts as that token alone, not as text which looks like it. `signs`: each
    is a set of texts that a chat template of this format contains. `toolless_sign`: a text of a chat template that
    knows no tools, whose model has learnt this format nevertheless; "" = there is none.
    """

    name: str
    read: Read
    shape: CallShape
    tags: tuple[str, ...] = ()
    triggers: tuple[str, ...] = ()
    openings: tuple[str, ...] = ()
    signs: tuple[tuple[str, ...], ...] = ()
    toolless_sign: str = ""
    new_id: Callable[[], str] = call_id
