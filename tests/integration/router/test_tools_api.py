"""Tools and reasoning of /v1/chat/completions, read with the `openai` client."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tandem.core.output_format_names import ReasoningField
from tests.integration.router.house import RouterHarness, builder
from tests.integration.router.scripted_worker import Script
from tests.integration.router.tool_models import Said, tool_model

WEATHER = {
    "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]
}  # fmt: skip
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
USER: Any = [{"role": "user", "content": "How is the weather?"}]
CALLS = (
    '<think>\nI have to look.\n</think>\n\nLet me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": '
    '"Zürich", "days": 3}}\n</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
ARGUMENTS = ['{"city": "Zürich", "days": 3}', "{}"]


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RouterHarness, Said]]:
    folder = tmp_path_factory.mktemp("router")
    model = tool_model(folder)
    said = Said(model)
    with builder(folder) as make:
        house = make(models=(model,), script=Script(answer=said.answer), reasoning_field=ReasoningField.BOTH)
        house.wait_ready()
        yield house, said


@pytest.fixture
def house(serving: tuple[RouterHarness, Said]) -> RouterHarness:
    return serving[0]


@pytest.fixture
def said(serving: tuple[RouterHarness, Said]) -> Said:
    said = serving[1]
    said.texts, said.is_cut = [CALLS], False
    return said


@pytest.fixture
def client(house: RouterHarness) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{house.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(house: RouterHarness, **more: Any) -> httpx.Response:
    body = {"model": "tools", "messages": USER, "max_tokens": 300, **more}
    return httpx.post(f"{house.url}/v1/chat/completions", json=body, timeout=30)


def error_of(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


def prompt_of(house: RouterHarness, said: Said) -> str:
    return said.prompt(house.workers["prefill-0"].submitted[-1])


def test_calls_reasoning_and_content_are_told_apart(client: openai.OpenAI, said: Said) -> None:
    answer = client.chat.completions.create(model="tools", messages=USER, tools=TOOLS, max_tokens=300)
    choice = answer.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
    calls: Any = choice.message.tool_calls
    assert [call.function.name for call in calls] == ["get_weather", "now"]
    assert [call.function.arguments for call in calls] == ARGUMENTS
    assert len({call.id for call in calls}) == 2
    fields: Any = choice.message.model_extra
    assert (fields["reasoning_content"], fields["reasoning"]) == ("I have to look.", "I have to look.")
    usage: Any = answer.usage
    assert 0 < usage.completion_tokens_details.reasoning_tokens < usage.completion_tokens


def test_the_wait_for_what_users_read_is_measured(house: RouterHarness, said: Said) -> None:
    """A thought alone is none of it."""
    name = "tandem_time_to_first_content_seconds"
    counts = []
    for text in ("<think>\nI have to look.\n</think>\n\nLet me see.", CALLS, "Yes.", "<think>\nI have to"):
        said.texts = [text]
        assert ask(house, tools=TOOLS).status_code == 200
        counts.append(house.metric(f'{name}_count{{model="tandem-tiny"}}'))
    assert [after - counts[0] for after in counts] == [0, 1, 2, 2]


def test_a_stream_has_the_same_in_pieces(client: openai.OpenAI, said: Said) -> None:
    said.texts = [CALLS, "No calls.\n"]
    ask: dict[str, Any] = {"model": "tools", "messages": USER, "tools": TOOLS, "max_tokens": 300, "n": 2}
    content, reasoning, finishes = ["", ""], ["", ""], ["", ""]
    calls: list[list[Any]] = [[], []]
    for chunk in client.chat.completions.create(**ask, stream=True):
        for choice in chunk.choices:
            delta: Any = choice.delta
            content[choice.index] += delta.content or ""
            reasoning[choice.index] += delta.model_extra.get("reasoning_content", "")
            finishes[choice.index] += choice.finish_reason or ""
            for call in delta.tool_calls or ():
                if call.index == len(calls[choice.index]):
                    assert call.id
                    assert call.type == "function"
                    calls[choice.index].append([call.function.name, ""])
                else:
                    assert (call.id, call.type, call.function.name) == (None, None, None)
                calls[choice.index][call.index][1] += call.function.arguments
    assert content == ["Let me see.", "No calls.\n"]
    assert reasoning == ["I have to look.", ""]
    assert finishes == ["tool_calls", "stop"]
    assert calls == [[["get_weather", ARGUMENTS[0]], ["now", "{}"]], []]


def test_results_go_back_into_the_prompt(client: openai.OpenAI, house: RouterHarness, said: Said) -> None:
    answer = client.chat.completions.create(model="tools", messages=USER, tools=TOOLS, max_tokens=300)
    before = prompt_of(house, said)
    message = answer.choices[0].message.model_dump()
    calls: Any = answer.choices[0].message.tool_calls
    results = [{"role": "tool", "tool_call_id": call.id, "content": f"{call.function.name}: 21°"} for call in calls]
    said.texts = ["It is fine."]
    messages: Any = [*USER, message, *results]
    second = client.chat.completions.create(model="tools", messages=messages, tools=TOOLS, max_tokens=300)
    assert (second.choices[0].message.content, second.choices[0].finish_reason) == ("It is fine.", "stop")
    assert second.choices[0].message.tool_calls is None
    prompt = prompt_of(house, said)
    assert prompt.startswith(before + CALLS), "an answer is written as the model wrote it"
    assert "get_weather: 21°" in prompt
    assert "now: 21°" in prompt


def test_what_the_openai_package_parsed_comes_back(client: openai.OpenAI, house: RouterHarness, said: Said) -> None:
    function = {"name": "get_weather", "parameters": {**WEATHER, "additionalProperties": False}, "strict": True}
    tools: Any = [{"type": "function", "function": function}, TOOLS[1]]
    said.texts = [CALLS]
    first = client.chat.completions.create(model="tools", messages=USER, tools=tools, max_tokens=300).choices[0].message
    before = prompt_of(house, said)
    message: Any = first.model_dump()
    message["parsed"] = None
    for call in message["tool_calls"]:
        call["function"]["parsed_arguments"] = json.loads(call["function"]["arguments"])
    said.texts = ["It is fine."]
    client.chat.completions.create(model="tools", messages=[*USER, message], tools=tools, max_tokens=300)
    assert prompt_of(house, said).startswith(before + CALLS)


@pytest.mark.parametrize("is_strict", [False, True])
def test_a_schema_holds_beside_tools_that_may_be_called(house: RouterHarness, said: Said, is_strict: bool) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["fine"]}}}
    function = {"name": "get_weather", "parameters": WEATHER, "strict": is_strict}
    tools = [{"type": "function", "function": function}]
    choice = ask(house, tools=tools, response_format=wanted).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    grammar = json.loads(house.workers["prefill-0"].submitted[-1].sampling.grammar)["grammars"]
    assert "get_weather" in grammar[0]["lark_grammar"]
    assert grammar[1]["json_schema"]["enum"] == ["fine"]
    forced = ask(house, tools=tools, response_format=wanted, tool_choice="required")
    assert "cannot be combined" in error_of(forced)["message"]


def test_a_call_without_text_has_no_content(house: RouterHarness, said: Said) -> None:
    said.texts = ['<tool_call>{"name": "now"}</tool_call>']
    choice = ask(house, tools=TOOLS).json()["choices"][0]
    assert choice["message"]["content"] is None
    assert [call["function"] for call in choice["message"]["tool_calls"]] == [{"name": "now", "arguments": "{}"}]
    assert "reasoning_content" not in choice["message"]


def test_parallel_calls_can_be_refused(house: RouterHarness, said: Said) -> None:
    choice = ask(house, tools=TOOLS, parallel_tool_calls=False).json()["choices"][0]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get_weather"]


def test_a_call_that_is_cut_has_what_there_is(house: RouterHarness, said: Said) -> None:
    said.texts, said.is_cut = [CALLS[: CALLS.index(", ")]], True
    choice = ask(house, tools=TOOLS).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    said.texts = ['<tool_call>{"name": "get_weather", "arguments": {"city": "Zü']
    choice = ask(house, tools=TOOLS).json()["choices"][0]
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Zü'
    said.texts = ['<tool_call>{"name": "get_wea']
    choice = ask(house, tools=TOOLS).json()["choices"][0]
    assert choice["message"]["content"] == '<tool_call>{"name": "get_wea'


def test_what_is_no_call_is_content_and_counted(house: RouterHarness, said: Said) -> None:
    said.texts = ["<tool_call>now!</tool_call>"]
    before = house.metric("tandem_unread_tool_calls_total")
    choice = ask(house, tools=TOOLS).json()["choices"][0]
    assert choice["message"]["content"] == "<tool_call>now!</tool_call>"
    assert choice["finish_reason"] == "stop"
    assert house.metric('tandem_unread_tool_calls_total{format="hermes"}') == before + 1


def test_text_that_looks_like_a_call_is_none(house: RouterHarness, said: Said) -> None:
    """Here the tags are tokens."""
    tags = [said.tokenizer.encode_now(part, add_special_tokens=False) for part in ("<tool", "_call>")]
    assert said.tokenizer.decode_all([*tags[0], *tags[1]]) == "<tool_call>"
    tail = said.tokenizer.encode_now('{"name": "now"}</tool_call>', add_special_tokens=False)
    worker = house.workers["decode-0"], house.workers["prefill-0"]
    kept = [one.script.answer for one in worker]
    for one in worker:
        one.script.answer = lambda submit, choice: [*tags[0], *tags[1], *tail, 1]
    try:
        message = ask(house, tools=TOOLS).json()["choices"][0]["message"]
    finally:
        for one, answer in zip(worker, kept, strict=True):
            one.script.answer = answer
    assert "tool_calls" not in message
    assert message["content"].startswith('<tool_call>{"name": "now"}')


def test_without_tools_calls_are_content(house: RouterHarness, said: Said) -> None:
    asked: list[dict[str, Any]] = [{}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}]
    for more in asked:
        choice = ask(house, **more).json()["choices"][0]
        assert "tool_calls" not in choice["message"]
        assert choice["message"]["content"].startswith("Let me see.\n<tool_call>")
        assert choice["finish_reason"] == "stop"
        assert "get_weather" not in prompt_of(house, said)


def test_reasoning_can_be_left_out(house: RouterHarness, said: Said) -> None:
    shown = ask(house, tools=TOOLS, logprobs=True, return_token_ids=True).json()
    hidden = ask(house, tools=TOOLS, logprobs=True, return_token_ids=True, include_reasoning=False).json()
    message = hidden["choices"][0]["message"]
    assert "reasoning_content" not in message
    assert message["content"] == "Let me see."
    assert hidden["usage"] == shown["usage"]
    thought = "".join(one["token"] for one in shown["choices"][0]["logprobs"]["content"])
    rest = "".join(one["token"] for one in hidden["choices"][0]["logprobs"]["content"])
    assert "I have to look" in thought
    assert "look" not in rest
    assert len(hidden["choices"][0]["token_ids"]) < len(shown["choices"][0]["token_ids"])


def test_effort_turns_reasoning_off(house: RouterHarness, said: Said) -> None:
    closed = "<think>\n\n</think>\n\n"
    for more, is_off in (
        ({}, False),
        ({"reasoning_effort": "none"}, True),
        ({"reasoning_effort": "high"}, False),
        ({"chat_template_kwargs": {"enable_thinking": False}}, True),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, False),
    ):
        assert ask(house, **more).status_code == 200
        assert prompt_of(house, said).endswith(closed) == is_off, more


def test_reasoning_as_an_object(house: RouterHarness, said: Said) -> None:
    """As OpenRouter's clients send it: each field has the effect of the parameter that it stands for."""
    closed = "<think>\n\n</think>\n\n"
    for reasoning, is_off in (({"enabled": False}, True), ({"effort": "none"}, True), ({"enabled": True}, False)):
        assert ask(house, reasoning=reasoning).status_code == 200
        assert prompt_of(house, said).endswith(closed) == is_off, reasoning
    hidden, shown = (ask(house, reasoning={"exclude": one}).json()["choices"][0]["message"] for one in (True, False))
    assert "reasoning_content" not in hidden
    assert shown["reasoning_content"] == "I have to look."
    assert ask(house, reasoning={"max_tokens": 30}).status_code == 200
    (sent,) = house.workers["prefill-0"].submitted[-1:]
    assert sent.sampling.thoughts.tokens == 29
    assert not ask(house).is_error
    assert not house.workers["prefill-0"].submitted[-1].sampling.HasField("thoughts")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning": {"enabled": False, "effort": "high"}}, "reasoning.effort"),
        ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, "reasoning.effort"),
        ({"reasoning": {"exclude": True}, "include_reasoning": True}, "reasoning.exclude"),
        ({"reasoning": {"max_tokens": 7}, "thinking_token_budget": 8}, "reasoning.max_tokens"),
        ({"reasoning": {"max_tokens": 7.5}}, "reasoning.max_tokens"),
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
        ({"thinking_token_budget": 2**31}, "thinking_token_budget"),
    ],
)
def test_what_contradicts_itself_about_reasoning_is_named(
    house: RouterHarness, said: Said, fields: dict[str, Any], param: str
) -> None:
    assert error_of(ask(house, **fields))["param"] == param


def tool(name: Any = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def custom(name: Any = "f", **more: Any) -> dict[str, Any]:
    return {"type": "custom", "custom": {"name": name, **more}}


def grammar(syntax: str, definition: str) -> dict[str, Any]:
    return {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}


UNKNOWN = {"type": "object", "properties": {"city": {"type": "text"}}}
DEEP: Any = {}
for _ in range(40):
    DEEP = {"properties": DEEP}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [tool("a b")]}, "tools[0].function.name"),
        ({"tools": [tool("x" * 65)]}, "tools[0].function.name"),
        ({"tools": [tool(), tool()]}, "tools[1].function.name"),
        ({"tools": [tool(f"f{place}") for place in range(129)]}, "tools"),
        ({"tools": [tool(parameters={"a": "x" * 70_000})]}, "tools[0].function.parameters"),
        ({"tools": [tool(parameters=DEEP)]}, "tools[0].function.parameters"),
        ({"tools": [tool(f"f{n}", parameters={"a": "x" * 60_000}) for n in range(9)]}, "tools"),
        ({"tools": [tool(strict="yes")]}, "tools[0].function.strict"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "custom"}]}, "tools[0].custom"),
        ({"tools": [custom("a b")]}, "tools[0].custom.name"),
        ({"tools": [tool(), custom()]}, "tools[1].custom.name"),
        ({"tools": [custom(format={"type": "json"})]}, "tools[0].custom.format"),
        ({"tools": [custom(format={"type": "grammar"})]}, "tools[0].custom.format.grammar"),
        ({"tools": [custom(format=grammar("ebnf", "a"))]}, "tools[0].custom.format.grammar.syntax"),
        ({"tools": [custom(f"f{n}", format=grammar("regex", "a")) for n in range(17)]}, "tools"),
        ({"tools": [custom(format=grammar("regex", ""))]}, "tools[0].custom.format.grammar.definition"),
        ({"tools": [custom(format=grammar("regex", "(a"))]}, "tools[0].custom.format.grammar.definition"),
        ({"tools": [custom(format=grammar("regex", "a" * 70_000))]}, "tools[0].custom.format.grammar.definition"),
        ({"tools": [custom(format=grammar("lark", 'start: "a"'))]}, "tools[0].custom.format.grammar.syntax"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice.function.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "custom", "custom": {"name": "g"}}}, "tool_choice.custom.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "mcp"}}, "tool_choice.type"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [
            {"type": "function", "function": {"name": "g"}}]}}}, "tool_choice.allowed_tools.tools[0].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"messages": [*USER, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "a"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}]},
         "messages[0].tool_calls"),
        ({"tools": [tool(parameters=UNKNOWN)], "tool_choice": "required"},
         "tools[0].function.parameters.properties.city.type"),
        ({"tools": [tool("f"), tool("g", strict=True, parameters=UNKNOWN)]},
         "tools[1].function.parameters.properties.city.type"),
        ({"tools": [tool(parameters=UNKNOWN)], "response_format": {"type": "json_object"}},
         "tools[0].function.parameters.properties.city.type"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "type": "custom", "custom": {"name": "f"}}]}]},
         "messages[0].tool_calls[0].custom.input"),
    ],
)  # fmt: skip
def test_mistakes_are_named(house: RouterHarness, fields: Any, param: str) -> None:
    assert error_of(ask(house, **fields))["param"] == param


@pytest.mark.parametrize("arguments", ["{'city': 'Oslo'}", '{"city": "Oslo"', "[]", "Oslo"])
def test_arguments_that_a_model_wrote_wrong_are_shown_to_it(house: RouterHarness, said: Said, arguments: str) -> None:
    """Agents send them back, with what was wrong as the result."""
    call = {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "a", "content": "Error: the arguments are no JSON object"}
    messages = [*USER, {"role": "assistant", "tool_calls": [call]}, result]
    assert ask(house, tools=TOOLS, messages=messages).status_code == 200
    assert f'"arguments": {json.dumps(arguments)}' in prompt_of(house, said)


def test_allowed_tools_are_a_choice_among_those_of_the_prompt(house: RouterHarness, said: Said) -> None:
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "now"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    assert ask(house, tools=TOOLS, tool_choice=choice).status_code == 200
    assert "get_weather" in prompt_of(house, said)


INPUT = 'He said "é\n\\😀"'
CUSTOM_CALL = f'<tool_call>{{"name": "run", "arguments": {{"input": {json.dumps(INPUT)}}}}}</tool_call>'


def test_the_input_of_a_custom_tool_is_a_text(house: RouterHarness, said: Said) -> None:
    said.texts = [CUSTOM_CALL + '<tool_call>{"name": "now"}</tool_call>']
    tools = [custom("run", description="Runs a program"), *TOOLS]
    choice = ask(house, tools=tools).json()["choices"][0]
    calls = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    assert [call["type"] for call in calls] == ["custom", "function"]
    assert calls[0]["custom"] == {"name": "run", "input": INPUT}
    before = prompt_of(house, said)
    assert '"input": {"type": "string"}' in before

    said.texts = ["Done."]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "0"} for call in calls]
    assert ask(house, tools=tools, messages=[*USER, choice["message"], *results]).status_code == 200
    assert prompt_of(house, said).startswith(before)
    assert json.dumps(INPUT, ensure_ascii=False) in prompt_of(house, said)


def test_a_stream_has_the_same_input_in_pieces(client: openai.OpenAI, said: Said) -> None:
    said.texts = [CUSTOM_CALL]
    tools: Any = [custom("run")]
    deltas: list[Any] = [
        call.to_dict()
        for chunk in client.chat.completions.create(
            model="tools", messages=USER, tools=tools, max_tokens=300, stream=True
        )
        for choice in chunk.choices
        for call in choice.delta.tool_calls or ()
    ]
    first, *others = deltas
    assert (first["index"], first["type"], first["custom"]) == (0, "custom", {"name": "run", "input": ""})
    assert first["id"]
    assert all(set(one) == {"index", "custom"} and set(one["custom"]) == {"input"} for one in others)
    assert "".join(one["custom"]["input"] for one in others) == INPUT
    assert len(others) > 4


def test_a_custom_tool_can_be_chosen_and_its_regex_holds(house: RouterHarness, said: Said) -> None:
    said.texts = ['<tool_call>{"name": "run", "arguments": {"input": "12"}}</tool_call>']
    tools = [custom("run", format=grammar("regex", "[0-9]+")), *TOOLS]
    named = {"type": "custom", "custom": {"name": "run"}}
    for choice in ("auto", named, {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}):
        answer = ask(house, tools=tools, tool_choice=choice).json()["choices"][0]
        assert answer["message"]["tool_calls"][0]["custom"]["input"] == "12"
        constraint = house.workers["prefill-0"].submitted[-1].sampling.grammar
        assert "^(?:[0-9]+)$" in constraint
        assert ("get_weather" in constraint) == (choice == "auto")


def test_a_model_without_a_format_calls_nothing(shared: RouterHarness) -> None:
    answer = httpx.post(
        f"{shared.url}/v1/chat/completions", json={"model": "tiny", "messages": USER, "tools": TOOLS, "max_tokens": 4}
    )
    assert error_of(answer)["param"] == "tools"
    effort = {"model": "tiny", "messages": USER, "reasoning_effort": "low", "max_tokens": 4}
    assert error_of(httpx.post(f"{shared.url}/v1/chat/completions", json=effort))["param"] == "reasoning_effort"
    none = httpx.post(f"{shared.url}/v1/chat/completions", json={**effort, "reasoning_effort": "none"})
    assert "completion_tokens_details" not in none.json()["usage"]


def test_tokens_of_a_prompt_with_tools_can_be_counted(house: RouterHarness, said: Said) -> None:
    assert ask(house, tools=TOOLS).status_code == 200
    body = {"model": "tools", "messages": USER, "tools": TOOLS}
    tokens = httpx.post(f"{house.url}/tokenize", json=body).json()["tokens"]
    assert tokens == list(house.workers["prefill-0"].submitted[-1].prompt)
    assert json.loads(json.dumps(tokens)) == tokens
