"""Markers that models put around their reasoning, as data."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.router.output_formats.families.harmony import CHANNEL, ENDS, MESSAGE, START


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """`begin` and `end` surround reasoning at the beginning of an answer; a prompt may end with `begin` already. Both
    are empty where the format of tool calls has channels of its own.

    `opening` begins reasoning, and the tags `endings` end it, in both cases. `closing` ends it before the model does;
    `answer` stands between that and the text that users read.
    """

    name: str
    opening: str
    endings: tuple[str, ...]
    closing: str
    answer: str = ""
    begin: str = ""
    end: str = ""

    @property
    def tags(self) -> tuple[str, ...]:
        return (self.begin, self.end) if self.begin else ()


def _surrounded(name: str, begin: str, end: str, closing: str) -> ReasoningFormat:
    return ReasoningFormat(name=name, begin=begin, end=end, opening=begin, endings=(end,), closing=closing)


THINK = _surrounded("think", "<think>", "</think>", "\n</think>\n\n")
MISTRAL_THINK = _surrounded("mistral", "[THINK]", "[/THINK]", "[/THINK]")
HARMONY_CHANNELS = ReasoningFormat(
    name="harmony",
    opening=f"{CHANNEL}analysis{MESSAGE}",
    endings=(*ENDS, START, CHANNEL),
    closing=f"<|end|>{START}assistant",
    answer=f"{CHANNEL}final{MESSAGE}",
)
