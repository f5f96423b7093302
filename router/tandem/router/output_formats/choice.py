"""Tools of a request, how its answer may call them, and how long it may think."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tandem.router.output_formats.custom_tools import Customs
from tandem.router.output_formats.tool_format import Schemas

Mode = Literal["none", "auto", "required", "named"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """`tools` are those of the request, as templates read them: `{"type": "function", "function": {…}}`. Those with a
    name in `allowed` may be called. `mode`: "required" = at least one call, "named" = exactly the one function.
    `customs` are those that stand for custom tools."""

    tools: Sequence[Mapping[str, Any]]
    mode: Mode
    allowed: tuple[str, ...]
    is_parallel: bool = True
    customs: Customs = field(default_factory=dict)

    @property
    def is_forced(self) -> bool:
        return self.mode in ("required", "named")

    @property
    def schemas(self) -> Schemas:
        """Schemas of the parameters of all functions that may be called, by name."""
        functions = (tool["function"] for tool in self.tools)
        return {one["name"]: one.get("parameters") or {} for one in functions if one["name"] in self.allowed}

    @property
    def strict(self) -> frozenset[str]:
        """Functions whose arguments must follow their schema."""
        return frozenset(tool["function"]["name"] for tool in self.tools if tool["function"].get("strict"))


@dataclass(frozen=True, slots=True)
class ThoughtLimit:
    """Tokens of thought that an answer may have, and the field of the request that asked for it."""

    tokens: int
    param: str
