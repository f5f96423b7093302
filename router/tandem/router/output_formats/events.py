"""Parts of an answer in the order in which the model wrote them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The call number `index` of the answer begins; its arguments follow, or its input if it is of a custom tool."""

    index: int
    id: str
    name: str
    is_custom: bool = False


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next part of the arguments of the call number `index`, as JSON."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallInput:
    """The next part of the text that the call number `index` gives a custom tool."""

    index: int
    text: str


Event = Content | Reasoning | CallStart | CallArguments | CallInput
