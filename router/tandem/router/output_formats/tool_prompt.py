"""Writes tools, calls and results as plain texts of a chat, for chat templates that know none of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tandem.router.output_formats.tool_format import CallShape

_INSTRUCTION = """\
You may call functions. These are described here:
<tools>
{tools}
</tools>
To call one, write nothing but
{example}
and wait for its result. Otherwise answer in plain words."""


def with_tools_as_text(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], shape: CallShape
) -> list[dict[str, Any]]:
    """`messages` of roles and contents alone: tools are described in the system's message, calls are a part of the
    answer in the notation `shape`, of style "json", and results are the user's, between `<tool_response>` tags."""
    written: list[dict[str, Any]] = []
    is_behind_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        turn = _result(message) if is_result else _answer(message, shape)
        if turn["role"] == "user" and is_behind_result:  # templates may want turns to alternate
            written[-1]["content"] += f"\n{turn['content']}"
        else:
            written.append(turn)
        is_behind_result = is_result
    if tools:
        example = _calls([("function_name", '{"parameter": "value"}')], shape)
        described = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
        instruction = _INSTRUCTION.format(tools=described, example=example)
        if written and written[0]["role"] in ("system", "developer"):
            written[0]["content"] = f"{written[0]['content']}\n\n{instruction}"
        else:
            written.insert(0, {"role": "system", "content": instruction})
    return written


def _answer(message: Mapping[str, Any], shape: CallShape) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return dict(message)
    functions = [call["function"] for call in message["tool_calls"]]
    calls = _calls([(function["name"], function["arguments"]) for function in functions], shape)
    others = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**others, "content": f"{message.get('content') or ''}{calls}"}


def _calls(calls: Sequence[tuple[str, str]], shape: CallShape) -> str:
    """Calls as a model writes them; arguments are JSON texts."""
    written = [
        shape.call.replace('"$name"', json.dumps(name)).replace("$name", name).replace("$arguments", arguments)
        for name, arguments in calls
    ]
    return shape.before + shape.between.join(written) + shape.after


def _result(message: Mapping[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
