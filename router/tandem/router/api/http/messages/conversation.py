"""Conversations of /v1/messages as chats: system and messages, as chat templates read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import orjson

from tandem.core.errors import InvalidRequestError
from tandem.router.api.http.messages.blocks import (
    Block,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from tandem.router.api.http.messages.schemas import CountTokensRequest, MessageParam
from tandem.router.api.http.messages.signatures import thought_of
from tandem.router.api.http.tool_fields import named_results
from tandem.router.error_quoting import quoted
from tandem.router.tokenization.chat_template import DEFAULT_RENDERING, THOUGHT_NAMES, Rendering

VOLATILE = "x-anthropic-billing-header:"
"""Begins a line that Claude Code puts first, with another content in every turn: no prefix would be found again."""
_REMINDER = "<system-reminder>\n%s\n</system-reminder>"
"""Marks the system's text in a user's turn, with the words that Claude Code uses there itself."""
ChatMessage = dict[str, Any]


def chat_messages(body: CountTokensRequest) -> tuple[ChatMessage, ...]:
    """The messages of the same chat. Messages of one role in a row are one turn, as Anthropic joins them.

    Messages of the system after the first of another role are in the user's turn, as few chat templates write them
    elsewhere than at the beginning.
    """
    first = next((at for at, message in enumerate(body.messages) if message.role != "system"), len(body.messages))
    system = [body.system] if isinstance(body.system, str) else [block.text for block in body.system or ()]
    system += [_text(_content(message)) for message in body.messages[:first]]
    lasting = [text for text in map(_without_volatile, system) if text]
    said: list[ChatMessage] = [{"role": "system", "content": "\n".join(lasting)}] if lasting else []
    for is_answer, turn in groupby(body.messages[first:], key=lambda message: message.role == "assistant"):
        blocks = [block for message in turn for block in _in_turn(message)]
        said += _assistant(blocks) if is_answer else _asked(blocks)
    return named_results(said)


def rendering_of(body: CountTokensRequest) -> Rendering:
    """The answer goes on with a last message of the assistant's."""
    if body.messages[-1].role != "assistant":
        return DEFAULT_RENDERING
    return Rendering(adds_prompt=False, continues_last=True)


def _content(message: MessageParam) -> Sequence[Block]:
    return [TextBlock(type="text", text=message.content)] if isinstance(message.content, str) else message.content


def _in_turn(message: MessageParam) -> Sequence[Block]:
    blocks = _content(message)
    return [TextBlock(type="text", text=_REMINDER % _text(blocks))] if message.role == "system" else blocks


def _asked(blocks: Sequence[Block]) -> Iterable[ChatMessage]:
    """Results of tools stand behind the calls that they answer, so the text follows them."""
    for block in blocks:
        if isinstance(block, ToolResultBlock):
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block)}
    if not blocks or any(isinstance(block, TextBlock) for block in blocks):
        yield {"role": "user", "content": _text(blocks)}


def _assistant(blocks: Sequence[Block]) -> Iterable[ChatMessage]:
    said: ChatMessage = {"role": "assistant", "content": _text(blocks)}
    thoughts = [thought for block in blocks if isinstance(block, ThinkingBlock) if (thought := thought_of(block))]
    if thoughts:
        said |= dict.fromkeys(THOUGHT_NAMES, "\n".join(thoughts))
    calls = [_call(block) for block in blocks if isinstance(block, ToolUseBlock)]
    if calls:
        said |= {"tool_calls": calls, "content": said["content"] or None}
    yield said


def _call(block: ToolUseBlock) -> dict[str, Any]:
    try:
        arguments = orjson.dumps(block.input).decode()
    except TypeError:  # its way to say that lists and objects are too many inside each other
        what = f"the input of the call {quoted(block.id)} is nested too deeply"
        raise InvalidRequestError(what, todo="flatten it", param="messages") from None
    function = {"name": block.name, "arguments": arguments}
    return {"id": block.id, "type": "function", "function": function}


def _result(block: ToolResultBlock) -> str:
    content = block.content if isinstance(block.content, str) else _text(block.content or ())
    return f"Error: {content}" if block.is_error else content


def _text(blocks: Iterable[Block]) -> str:
    return "\n".join(block.text for block in blocks if isinstance(block, TextBlock))


def _without_volatile(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(VOLATILE) else text
