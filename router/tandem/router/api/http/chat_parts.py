"""Content, reasoning and tool calls of a chat answer, in the shapes of OpenAI's chat API."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tandem.core.output_format_names import ReasoningField
from tandem.core.state_enums import FinishReason
from tandem.router.output_formats.events import CallArguments, CallInput, CallStart, Content, Event, Reasoning
from tandem.router.serving.choices import ChoiceUpdate


def reasoning_fields(field: ReasoningField) -> tuple[str, ...]:
    """Names of the fields with the reasoning of an answer."""
    if field is ReasoningField.BOTH:
        return (ReasoningField.REASONING_CONTENT.value, ReasoningField.REASONING.value)
    return (field.value,)


def deltas(parts: Iterable[Event], fields: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Each part as the delta of an event. A call's id and name come once, then its arguments alone."""
    for part in parts:
        match part:
            case Content(text):
                yield {"content": text}
            case Reasoning(text):
                yield dict.fromkeys(fields, text)
            case CallStart(index, given, name, is_custom=True):
                custom = {"name": name, "input": ""}
                yield {"tool_calls": [{"index": index, "id": given, "type": "custom", "custom": custom}]}
            case CallStart(index, given, name):
                function = {"name": name, "arguments": ""}
                yield {"tool_calls": [{"index": index, "id": given, "type": "function", "function": function}]}
            case CallArguments(index, text):
                yield {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
            case CallInput(index, text):
                yield {"tool_calls": [{"index": index, "custom": {"input": text}}]}


def message(choice: ChoiceUpdate, fields: Sequence[str]) -> dict[str, Any]:
    """The message of a whole choice; one with calls and no text has no content."""
    body: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
    if choice.parts is None:
        return body
    thought = "".join(part.text for part in choice.parts if isinstance(part, Reasoning))
    calls = calls_in(choice.parts)
    if thought:
        body |= dict.fromkeys(fields, thought)
    if calls:
        body["content"] = choice.text or None
        body["tool_calls"] = [_call(call, text) for call, text in calls]
    return body


def _call(call: CallStart, text: str) -> dict[str, Any]:
    if call.is_custom:
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": text}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": text}}


def calls_in(parts: Iterable[Event]) -> list[tuple[CallStart, str]]:
    """All calls with their arguments, or their inputs."""
    calls: list[tuple[CallStart, list[str]]] = []
    for part in parts:
        if isinstance(part, CallStart):
            calls.append((part, []))
        elif isinstance(part, CallArguments | CallInput):
            calls[-1][1].append(part.text)
    return [(call, "".join(texts)) for call, texts in calls]


def has_call(parts: Iterable[Event] | None) -> bool:
    return any(isinstance(part, CallStart) for part in parts or ())


def finish_of(finish: FinishReason | None, *, has_call: bool) -> str | None:
    """The reason in OpenAI's words."""
    return "tool_calls" if has_call and finish is FinishReason.STOP else finish
