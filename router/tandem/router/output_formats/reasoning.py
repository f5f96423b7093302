"""Markers that models put around their reasoning, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """`begin` and `end` surround reasoning at the beginning of an answer; a prompt may end with `begin` already. Both
    are empty where the format of tool calls has channels of its own."""

    name: str
    begin: str = ""
    end: str = ""

    @property
    def tags(self) -> tuple[str, ...]:
        return (self.begin, self.end) if self.begin else ()


THINK = ReasoningFormat(name="think", begin="<think>", end="</think>")
MISTRAL_THINK = ReasoningFormat(name="mistral", begin="[THINK]", end="[/THINK]")
HARMONY_CHANNELS = ReasoningFormat(name="harmony")
