"""Requests to /v1/messages as chats: messages, system, tools, and what is refused by name."""

from typing import Any

import pytest
from pydantic import ValidationError

from tandem.core.errors import InvalidRequestError, UnsupportedParameterError
from tandem.router.api.http.messages.blocks import ThinkingBlock
from tandem.router.api.http.messages.conversation import chat_messages, rendering_of
from tandem.router.api.http.messages.schemas import NEUTRAL, MessagesRequest, without_neutral
from tandem.router.api.http.messages.signatures import signature_of, thought_of
from tandem.router.api.http.messages.thinking import effort_of, shows_thoughts
from tandem.router.api.http.messages.tools import chat_tools, tool_use
from tandem.router.tokenization.chat_template import DEFAULT_RENDERING, THOUGHT_NAMES

HELLO: dict[str, Any] = {"role": "user", "content": "Hi"}
BODY: dict[str, Any] = {"model": "m", "max_tokens": 5, "messages": [HELLO]}
TOOL: dict[str, Any] = {"name": "look", "input_schema": {"type": "object"}}
EPHEMERAL = {"type": "ephemeral", "ttl": "1h"}


def parsed(**changes: Any) -> MessagesRequest:
    return MessagesRequest.model_validate(without_neutral({**BODY, **changes}))


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **more}


def chat(*messages: Any, **changes: Any) -> list[dict[str, Any]]:
    return list(chat_messages(parsed(messages=[*messages], **changes)))


def test_texts_and_blocks_of_text_are_the_same() -> None:
    assert chat(HELLO, system="Be brief.") == [{"role": "system", "content": "Be brief."}, HELLO]
    blocks = {"role": "user", "content": [text("Hi")]}
    assert chat(blocks, system=[text("Be brief.")]) == chat(HELLO, system="Be brief.")
    assert chat({"role": "user", "content": [text("a"), text("b")]}) == [{"role": "user", "content": "a\nb"}]
    assert chat({"role": "user", "content": []}) == [{"role": "user", "content": ""}]


def test_messages_of_one_role_in_a_row_are_one_turn() -> None:
    ends = {"role": "assistant", "content": "c"}
    said = chat(HELLO, {"role": "user", "content": [text("b")]}, ends, {"role": "assistant", "content": "d"}, HELLO)
    assert said == [{"role": "user", "content": "Hi\nb"}, {"role": "assistant", "content": "c\nd"}, HELLO]


def test_messages_of_the_system_are_in_front_or_in_a_turn_of_the_user() -> None:
    first, later = {"role": "system", "content": "a"}, {"role": "system", "content": [text("b")]}
    answer = {"role": "assistant", "content": "c"}
    said = chat(first, HELLO, later, answer, later, system="Be brief.")
    assert said == [
        {"role": "system", "content": "Be brief.\na"},
        {"role": "user", "content": "Hi\n<system-reminder>\nb\n</system-reminder>"},
        answer,
        {"role": "user", "content": "<system-reminder>\nb\n</system-reminder>"},
    ]
    assert chat(first) == [first]


@pytest.mark.parametrize("system", ["x-anthropic-billing-header: cc_version=2; cch=a1;\nBe brief.", "Be brief."])
def test_a_volatile_line_of_the_system_prompt_is_dropped(system: str) -> None:
    for first in ("cch=1;", "cch=2;"):
        header = text(f"x-anthropic-billing-header: cc_version=2.1; {first}")
        assert chat(HELLO, system=[header, text(system)]) == chat(HELLO, system="Be brief.")
    assert chat(HELLO, system=[text("x-anthropic-billing-header: cch=1;")]) == [HELLO]
    assert chat({"role": "user", "content": "x-anthropic-billing-header: a"})[0]["content"].endswith(" a")


def test_breakpoints_of_the_cache_change_nothing() -> None:
    call = {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "sky"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [text("blue")]}

    def asked(**marked: Any) -> MessagesRequest:
        inner = {**result, "content": [text("blue", **marked)], **marked}
        return parsed(
            system=[text("s", **marked)], tools=[{**TOOL, **marked}], **marked,
            messages=[
                {"role": "user", "content": [text("a", **marked)]},
                {"role": "assistant", "content": [{**call, **marked}]}, {"role": "user", "content": [inner]},
            ],
        )  # fmt: skip

    plain, marked = asked(), asked(cache_control=EPHEMERAL)
    assert chat_messages(plain) == chat_messages(marked)
    assert chat_tools(plain.tools or ()) == chat_tools(marked.tools or ())


def test_calls_and_results_of_tools() -> None:
    use = {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "sky"}, "caller": {"type": "direct"}}
    other = {"type": "tool_use", "id": "t2", "name": "wait", "input": {}}
    results = [
        text("Here:"),
        {"type": "tool_result", "tool_use_id": "t1", "content": "blue"},
        {"type": "tool_result", "tool_use_id": "t2", "content": [text("too"), text("late")], "is_error": True},
        {"type": "tool_result", "tool_use_id": "t3"},
    ]
    said = chat(
        HELLO, {"role": "assistant", "content": [text("Let me see."), use, other]}, {"role": "user", "content": results}
    )
    assert said[1:] == [
        {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [
                {"id": "t1", "type": "function", "function": {"name": "look", "arguments": '{"at":"sky"}'}},
                {"id": "t2", "type": "function", "function": {"name": "wait", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "blue", "name": "look"},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: too\nlate", "name": "wait"},
        {"role": "tool", "tool_call_id": "t3", "content": "", "name": None},
        {"role": "user", "content": "Here:"},
    ]
    assert [one["role"] for one in chat({"role": "user", "content": results[1:]})] == ["tool"] * 3


def test_thoughts_stand_under_every_name_and_redacted_ones_nowhere() -> None:
    blocks = [
        {"type": "thinking", "thinking": "Hm.", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "thinking", "thinking": "So:", "signature": ""},
        text("Yes."),
    ]
    said = chat(HELLO, {"role": "assistant", "content": blocks})[1]
    assert said == {"role": "assistant", "content": "Yes.", **dict.fromkeys(THOUGHT_NAMES, "Hm.\nSo:")}


@pytest.mark.parametrize("thought", ["Hm.", "✓ naïve", "", "\ud800"])
def test_a_thought_that_was_not_shown_comes_back(thought: str) -> None:
    for is_shown in (True, False):
        shown, signature = thought if is_shown else "", signature_of(thought, is_shown=is_shown)
        assert thought_of(ThinkingBlock(type="thinking", thinking=shown, signature=signature)) == thought
    for foreign in ("a", "ErUB", "é", None):
        assert thought_of(ThinkingBlock(type="thinking", thinking="", signature=foreign)) == ""


@pytest.mark.parametrize(
    ("changes", "effort"),
    [
        ({}, "none"),
        ({"output_config": {"effort": "high"}}, "none"),
        ({"thinking": {"type": "disabled"}}, "none"),
        ({"thinking": {"type": "adaptive"}}, "high"),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}, "low"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "low"),
        ({"thinking": {"type": "enabled", "budget_tokens": 8000}}, "medium"),
        ({"thinking": {"type": "enabled", "budget_tokens": 31_999}}, "high"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}, "output_config": {"effort": "max"}}, "max"),
    ],
)
def test_thinking_is_an_effort(changes: dict[str, Any], effort: str) -> None:
    assert effort_of(parsed(**changes)) == effort


@pytest.mark.parametrize(("display", "is_shown"), [(None, True), ("summarized", True), ("omitted", False)])
def test_thoughts_are_shown_unless_omitted(display: str | None, is_shown: bool) -> None:
    assert shows_thoughts(parsed(thinking={"type": "adaptive", "display": display})) is is_shown
    assert shows_thoughts(parsed())


def test_an_answer_goes_on_with_a_last_message_of_the_assistant() -> None:
    assert rendering_of(parsed()) == DEFAULT_RENDERING
    begun = rendering_of(parsed(messages=[HELLO, {"role": "assistant", "content": "("}]))
    assert (begun.adds_prompt, begun.continues_last) == (False, True)


def test_tools() -> None:
    named = {"name": "n" * 128, "input_schema": {"type": "object"}, "type": "custom", "eager_input_streaming": True}
    tools = [{**TOOL, "description": "Looks.", "strict": True}, named]
    parameters = {"type": "object"}
    assert chat_tools(parsed(tools=tools).tools or ()) == (
        {
            "type": "function",
            "function": {"name": "look", "description": "Looks.", "parameters": parameters, "strict": True},
        },
        {"type": "function", "function": {"name": "n" * 128, "parameters": parameters}},
    )


@pytest.mark.parametrize(
    ("choice", "mode", "is_parallel"),
    [
        (None, "auto", True),
        ({"type": "auto"}, "auto", True),
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto", False),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "tool", "name": "look"}, "named", False),
    ],
)
def test_tool_choice(choice: Any, mode: str, is_parallel: bool) -> None:
    body = parsed(tools=[TOOL, {**TOOL, "name": "wait"}], tool_choice=choice)
    use = tool_use(body.tools or (), body.tool_choice)
    assert use is not None
    assert (use.mode, use.is_parallel) == (mode, is_parallel)
    assert use.allowed == (("look",) if mode == "named" else ("look", "wait"))
    none = parsed(tools=[TOOL], tool_choice={"type": "none"})
    assert tool_use(none.tools or (), none.tool_choice) is None
    assert tool_use((), None) is None


@pytest.mark.parametrize(
    ("choice", "tools", "param"),
    [
        ({"type": "tool"}, [TOOL], "tool_choice.name"),
        ({"type": "auto", "name": "look"}, [TOOL], "tool_choice.name"),
        ({"type": "tool", "name": "hear"}, [TOOL], "tool_choice.name"),
        ({"type": "any"}, [], "tool_choice"),
    ],
)
def test_wrong_tool_choices_are_named(choice: Any, tools: list[Any], param: str) -> None:
    body = parsed(tools=tools, tool_choice=choice)
    with pytest.raises(InvalidRequestError) as caught:
        tool_use(body.tools or (), body.tool_choice)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0].type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [{"type": "image"}]}]}]},
            "messages[0].content[0].content[0].type",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
    ],
)
def test_what_is_known_and_lacking_is_refused_by_name(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(UnsupportedParameterError) as caught:
        parsed(**changes)
    assert caught.value.param == param


@pytest.mark.parametrize("kind", ["tool_use", "thinking", "redacted_thinking"])
def test_blocks_of_answers_are_refused_in_other_roles(kind: str) -> None:
    with pytest.raises(InvalidRequestError, match="role user have none"):
        parsed(messages=[{"role": "user", "content": [{"type": kind}]}])


def test_results_are_refused_in_answers() -> None:
    with pytest.raises(InvalidRequestError, match="role assistant have none"):
        parsed(messages=[HELLO, {"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "t"}]}])


@pytest.mark.parametrize(
    "neutral",
    [
        {"system": None, "stop_sequences": [], "metadata": {"user_id": "u"}, "service_tier": "standard_only"},
        {"thinking": {"type": "disabled"}, "tools": [], "tool_choice": {"type": "none"}, "output_config": {}},
        {"cache_control": {"type": "ephemeral"}, "mcp_servers": [], "speed": "standard", "container": None},
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}, "thread": False},
    ],
)
def test_what_asks_for_nothing_is_taken(neutral: dict[str, Any]) -> None:
    assert parsed(**neutral).max_tokens == 5


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_other_values_of_what_is_lacking_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedParameterError):
        parsed(**{name: ["something", "else"]})


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0}, {"max_tokens": None}, {"max_tokens": "5"}, {"messages": []}, {"messages": "Hi"},
        {"messages": [{"role": "tool", "content": "a"}]}, {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": [{"text": "a"}]}]}, {"system": [{"type": "image"}]},
        {"stop_sequences": [""]}, {"stop_sequences": ["a"] * 17}, {"stop_sequences": "a"}, {"max_tokns": 1},
        {"thinking": {"type": "enabled", "budget_tokens": 0}}, {"tools": [{"name": "a b", "input_schema": {}}]},
        {"tools": [{"name": "a"}]}, {"metadata": {"user": "u"}}, {"service_tier": "priority"}, {"n": 2},
        {"tools": [{**TOOL, "defer_loading": True}]}, {"cache_control": [1]},
    ],
)  # fmt: skip
def test_wrong_values_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        parsed(**wrong)
