"""Tools and reasoning of /v1/responses, read with the `openai` client: whole, streamed, and over several turns."""

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import ResponseItem
from pydantic import TypeAdapter

from tandem.router.api.http.responses.response_models import InputItemList, ResponseObject
from tandem.statestore.embedded_redis import PrivateRedis
from tests.integration.router.house import ROOT, RouterHarness, builder
from tests.integration.router.scripted_worker import Script
from tests.integration.router.tool_models import Said, tool_model

WEATHER = {
    "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]
}  # fmt: skip
TOOLS: Any = [
    {"type": "function", "name": "get_weather", "description": "Weather", "parameters": WEATHER},
    {"type": "function", "name": "now"},
]
CALLS = (
    '<think>\nI have to look.\n</think>\n\nLet me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": '
    '"Zürich", "days": 3}}\n</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
ARGUMENTS = ['{"city": "Zürich", "days": 3}', "{}"]
ASK: dict[str, Any] = {"model": "tools", "input": "How is the weather?", "tools": TOOLS, "max_output_tokens": 300}
ITEM: TypeAdapter[ResponseItem] = TypeAdapter(ResponseItem)


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory, redis: PrivateRedis) -> Iterator[tuple[RouterHarness, Said]]:
    folder = tmp_path_factory.mktemp("router")
    model = tool_model(folder)
    said = Said(model)
    with builder(folder) as make:
        house = make(models=(model,), script=Script(answer=said.answer), redis_url=redis.url)
        house.wait_ready()
        yield house, said


@pytest.fixture
def house(serving: tuple[RouterHarness, Said]) -> RouterHarness:
    return serving[0]


@pytest.fixture
def said(serving: tuple[RouterHarness, Said]) -> Said:
    said = serving[1]
    said.texts, said.then, said.is_cut = [CALLS], [], False
    return said


@pytest.fixture
def client(house: RouterHarness) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{house.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def prompt_of(house: RouterHarness, said: Said) -> str:
    return said.prompt(house.workers["prefill-0"].submitted[-1])


def post(house: RouterHarness, **more: Any) -> httpx.Response:
    return httpx.post(f"{house.url}/v1/responses", json=ASK | more, timeout=30)


def test_calls_reasoning_and_text_are_items(client: openai.OpenAI, house: RouterHarness, said: Said) -> None:
    answer = client.responses.create(**ASK, parallel_tool_calls=True)
    output: list[Any] = answer.output
    assert [item.type for item in output] == ["reasoning", "message", "function_call", "function_call"]
    assert {item.status for item in output} == {"completed"}
    assert ([part.text for part in output[0].content], output[0].summary) == (["I have to look."], [])
    assert answer.output_text == "Let me see."
    assert [(item.name, item.arguments) for item in output[2:]] == list(
        zip(("get_weather", "now"), ARGUMENTS, strict=True)
    )
    assert len({item.id for item in output} | {item.call_id for item in output[2:]}) == 6
    usage: Any = answer.usage
    assert 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens
    stored = httpx.get(f"{house.url}/v1/responses/{answer.id}").text
    assert ResponseObject.model_validate_json(stored, strict=True).tools is not None
    assert json.loads(stored)["tools"] == TOOLS
    assert client.responses.retrieve(answer.id).model_dump() == answer.model_dump()


def test_the_stream_says_the_same(client: openai.OpenAI, said: Said) -> None:
    whole = client.responses.create(**ASK)
    with client.responses.stream(**ASK) as stream:
        events: list[Any] = list(stream)
        final: Any = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    joined: dict[int, str] = {}
    for event in events:
        if event.type.endswith(".delta"):
            joined[event.output_index] = joined.get(event.output_index, "") + event.delta
    assert joined == {0: "I have to look.", 1: "Let me see.", 2: ARGUMENTS[0], 3: ARGUMENTS[1]}
    assert len([event for event in events if event.type == "response.function_call_arguments.delta"]) > 4
    done = [event.arguments for event in events if event.type == "response.function_call_arguments.done"]
    assert done == ARGUMENTS

    def shown(response: Any) -> list[Any]:
        dumped = [item.model_dump(exclude={"id", "call_id", "parsed_arguments"}) for item in response.output]
        return json.loads(json.dumps(dumped).replace(', "parsed": null', ""))  # type: ignore[no-any-return]

    assert shown(final) == shown(whole)
    assert final.usage == whole.usage
    assert [event.item.id for event in events if event.type == "response.output_item.done"] == [
        item.id for item in final.output
    ]


@pytest.mark.parametrize("is_by_id", [False, True])
def test_outputs_go_back_into_the_prompt(
    client: openai.OpenAI, house: RouterHarness, said: Said, is_by_id: bool
) -> None:
    first: Any = client.responses.create(**ASK)
    before = prompt_of(house, said)
    outputs: list[Any] = [
        {"type": "function_call_output", "call_id": item.call_id, "output": f"{item.name}: 21°"}
        for item in first.output if item.type == "function_call"
    ]  # fmt: skip
    said.texts = ["It is fine."]
    given: dict[str, Any] = {"previous_response_id": first.id, "input": outputs}
    if not is_by_id:
        given = {"input": [{"role": "user", "content": ASK["input"]}, *first.output, *outputs]}
    second = client.responses.create(**{**ASK, **given})
    assert second.output_text == "It is fine."
    prompt = prompt_of(house, said)
    assert prompt.startswith(before + CALLS), "an answer is written as the model wrote it"
    assert prompt.index("get_weather: 21°") < prompt.index("now: 21°")

    third = client.responses.create(**{**ASK, "input": "Thanks.", "previous_response_id": second.id})
    assert third.output_text == "It is fine."
    assert prompt_of(house, said).startswith(prompt + "It is fine.")


def test_the_example_of_the_page_runs(house: RouterHarness, said: Said, capsys: pytest.CaptureFixture[str]) -> None:
    said.texts, said.then = [CALLS.partition('<tool_call>\n{"name": "now')[0]], ["It is fine."]
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "tools.md").read_text(), flags=re.DOTALL)
    example = example.replace("http://127.0.0.1:8000", house.url).replace('"qwen3"', '"tools"')
    exec(compile(example, "tools.md", "exec"), {})
    assert capsys.readouterr().out == "It is fine.\n"
    assert "Zürich: 21°" in prompt_of(house, said)


@pytest.mark.parametrize("dumped", [{}, {"exclude_none": True}, {"exclude_unset": True}], ids=str)
def test_items_are_kept_as_the_client_types_them(
    client: openai.OpenAI, house: RouterHarness, said: Said, dumped: Any
) -> None:
    first: Any = client.responses.create(**ASK)
    parts = [{"type": "input_text", "text": "21°"}]
    outputs = [
        {"type": "function_call_output", "call_id": item.call_id, "output": given}
        for item, given in zip(first.output[2:], (parts, "noon"), strict=True)
    ]
    given: Any = [ASK["input"], *(item.model_dump(**dumped) for item in first.output), *outputs]
    given[0] = {"role": "user", "content": given[0]}
    second = client.responses.create(**{**ASK, "input": given})
    listed = httpx.get(f"{house.url}/v1/responses/{second.id}/input_items", params={"order": "asc"})
    assert len(InputItemList.model_validate_json(listed.text, strict=True).data) == 7
    kept: list[Any] = [ITEM.validate_json(json.dumps(one), strict=True) for one in listed.json()["data"]]
    assert [item.type for item in kept] == [
        "message", "reasoning", "message", "function_call", "function_call", "function_call_output",
        "function_call_output",
    ]  # fmt: skip
    assert [item.id for item in kept[1:5]] == [item.id for item in first.output]
    assert [(item.call_id, item.arguments) for item in kept[3:5]] == [
        (item.call_id, item.arguments) for item in first.output[2:]
    ]
    assert [one["output"] for one in listed.json()["data"][5:]] == [parts, "noon"]
    again = [item.model_dump(**dumped) for item in client.responses.input_items.list(second.id, order="asc")]
    client.responses.create(**{**ASK, "input": again})
    submitted = house.workers["prefill-0"].submitted
    assert list(submitted[-1].prompt) == list(submitted[-2].prompt)


def test_a_call_that_is_cut_is_incomplete_and_can_be_continued(
    client: openai.OpenAI, house: RouterHarness, said: Said
) -> None:
    said.texts, said.is_cut = [CALLS[: CALLS.index("rich")]], True
    tokens = len(said.tokenizer.encode_now(said.texts[0], add_special_tokens=False))
    answer: Any = client.responses.create(**ASK | {"max_output_tokens": tokens})
    assert (answer.status, answer.output[-1].status) == ("incomplete", "incomplete")
    assert answer.output[-1].arguments == '{"city": "Zü'
    said.texts, said.is_cut = ["I see."], False
    output: Any = {"type": "function_call_output", "call_id": answer.output[-1].call_id, "output": "no such city"}
    second = client.responses.create(**{**ASK, "input": [output], "previous_response_id": answer.id})
    assert second.output_text == "I see."
    assert "no such city" in prompt_of(house, said)


def test_parallel_calls_can_be_refused(client: openai.OpenAI, said: Said) -> None:
    answer = client.responses.create(**ASK, parallel_tool_calls=False)
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
    assert answer.parallel_tool_calls is False


@pytest.mark.parametrize("more", [{"tools": []}, {"tool_choice": "none"}])
def test_without_tools_calls_are_text(house: RouterHarness, said: Said, more: dict[str, Any]) -> None:
    answer = post(house, **more).json()
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message"]
    assert answer["output"][1]["content"][0]["text"].startswith("Let me see.\n<tool_call>")
    assert "get_weather" not in prompt_of(house, said)


def test_a_choice_reaches_the_worker_as_a_grammar(house: RouterHarness, said: Said) -> None:
    def grammar(choice: Any) -> str:
        assert post(house, tool_choice=choice).status_code == 200
        return house.workers["prefill-0"].submitted[-1].sampling.grammar

    assert grammar("auto") == ""
    assert '"now"' not in grammar({"type": "function", "name": "get_weather"})
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "now"}]}
    assert "get_weather" not in grammar(allowed)
    assert "get_weather" in prompt_of(house, said)
    assert all(f'"{name}' in grammar("required") for name in ("get_weather", "now"))


def test_effort_turns_reasoning_off(client: openai.OpenAI, house: RouterHarness, said: Said) -> None:
    closed = "<think>\n\n</think>\n\n"
    for effort in ("none", "high"):
        answer = client.responses.create(**ASK, reasoning={"effort": effort})
        assert prompt_of(house, said).endswith(closed) == (effort == "none")
        assert answer.reasoning is not None
        assert answer.reasoning.effort == effort


def test_reasoning_given_is_that_of_the_answer_behind_it(
    client: openai.OpenAI, house: RouterHarness, said: Said
) -> None:
    thought: Any = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Easy."}]}
    call: Any = {"type": "function_call", "call_id": "c1", "name": "now", "arguments": "{}"}
    output: Any = {"type": "function_call_output", "call_id": "c1", "output": "noon"}
    user: Any = {"role": "user", "content": "When?"}
    client.responses.create(**{**ASK, "input": [user, thought, call, output]})
    assert '<think>\nEasy.\n</think>\n\n<tool_call>\n{"name": "now", "arguments": {}}' in prompt_of(house, said)


def custom(name: str = "run", **more: Any) -> dict[str, Any]:
    return {"type": "custom", "name": name, **more}


def grammar(syntax: str, definition: str) -> dict[str, Any]:
    return {"type": "grammar", "syntax": syntax, "definition": definition}


INPUT = 'He said "é\n\\😀"'


def test_the_input_of_a_custom_tool_is_a_text(client: openai.OpenAI, house: RouterHarness, said: Said) -> None:
    """Whole, streamed, kept, and back in the prompt."""
    said.texts = [f'<tool_call>{{"name": "run", "arguments": {{"input": {json.dumps(INPUT)}}}}}</tool_call>']
    ask: Any = {**ASK, "tools": [custom(description="Runs a program", format={"type": "text"}), *TOOLS]}
    first = client.responses.create(**ask)
    call: Any = first.output[0]
    assert (call.type, call.name, call.input, call.status) == ("custom_tool_call", "run", INPUT, "completed")
    assert first.to_dict()["tools"] == ask["tools"]
    with client.responses.stream(**ask) as stream:
        events: list[Any] = list(stream)
        final: Any = stream.get_final_response().output[0]
    deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
    (done,) = [event for event in events if event.type == "response.custom_tool_call_input.done"]
    assert "".join(deltas) == done.input == final.input == INPUT
    assert len(deltas) > 4
    assert done.item_id == final.id

    said.texts = ["Done."]
    output: Any = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "exit 0"}
    second = client.responses.create(**{**ask, "input": [output], "previous_response_id": first.id})
    prompt = prompt_of(house, said)
    assert json.dumps(INPUT, ensure_ascii=False) in prompt
    assert "exit 0" in prompt
    by_hand: Any = [{"role": "user", "content": ASK["input"]}, call, output]
    third = client.responses.create(**{**ask, "input": by_hand})
    assert prompt_of(house, said) == prompt
    assert second.output_text == third.output_text == "Done."
    listed = httpx.get(f"{house.url}/v1/responses/{third.id}/input_items", params={"order": "asc"})
    assert len(InputItemList.model_validate_json(listed.text, strict=True).data) == 3
    kept: list[Any] = [ITEM.validate_json(json.dumps(one), strict=True) for one in listed.json()["data"]]
    assert (kept[1].input, kept[2].output) == (INPUT, "exit 0")


def test_a_regex_of_a_custom_tool_is_in_the_grammar(house: RouterHarness, said: Said) -> None:
    tools = [custom(format=grammar("regex", "[0-9]+"))]
    for choice in ("auto", "required", {"type": "custom", "name": "run"}):
        assert post(house, tools=tools, tool_choice=choice).status_code == 200
        assert "^(?:[0-9]+)$" in house.workers["prefill-0"].submitted[-1].sampling.grammar


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "f"}] * 2}, "tools[1].name"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "f", "strict": "yes"}]}, "tools[0].strict"),
        ({"tools": [{"type": "function", "name": f"f{place}"} for place in range(129)]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [custom("a b")]}, "tools[0].name"),
        ({"tools": [custom("get_weather"), *TOOLS]}, "tools[1].name"),
        ({"tools": [custom(format={"type": "grammar", "syntax": "regex"})]}, "tools[0].format.definition"),
        ({"tools": [custom(format=grammar("regex", "[a"))]}, "tools[0].format.definition"),
        ({"tools": [custom(format=grammar("lark", 'start: "a"'))]}, "tools[0].format.syntax"),
        ({"tools": [custom()], "tool_choice": {"type": "custom", "name": "g"}}, "tool_choice.name"),
        ({"tools": [{"type": "mcp", "server_label": "a", "server_url": "b"}]}, "tools[0].type"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "mcp", "server_label": "a"}}, "tool_choice.type"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function", "name": "f", "strict": True, "parameters": {"type": "nothing"}}],
          "tool_choice": "required"}, "tools[0].parameters.type"),
        ({"max_tool_calls": 1}, "max_tool_calls"),
        ({"tool_choice": "required", "text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"background": True}, "background"),
        ({"include": ["reasoning.encrypted_content", "file_search_call.results"]}, "include"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input[0].call_id"),
        ({"tools": [{**TOOLS[0], "strict": True, "parameters": {"properties": {"city": {"type": "text"}}}}]},
         "tools[0].parameters.properties.city.type"),
        ({"input": [{"type": "function_call", "call_id": None, "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": {}}]}, "input[0].arguments"),
    ],
)  # fmt: skip
def test_mistakes_are_named(house: RouterHarness, said: Said, more: dict[str, Any], param: str) -> None:
    answer = post(house, **more)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_agents_that_keep_reasoning_themselves_get_all_of_it(house: RouterHarness, said: Said) -> None:
    """Codex asks for it in this way, stores nothing, and sends it again."""
    asked = {"store": False, "include": ["reasoning.encrypted_content"], "reasoning": {"summary": "auto"}}
    first = post(house, **asked).json()
    assert first["reasoning"] == {"effort": None, "summary": "auto"}
    assert first["output"][0]["type"] == "reasoning"
    again = post(
        house, **asked, input=[{"role": "user", "content": "Hi"}, *first["output"], {"role": "user", "content": "So?"}]
    )
    assert again.status_code == 200, again.text


def test_a_model_without_a_format_calls_nothing(keeping: RouterHarness) -> None:
    for more, param in (({"tools": TOOLS}, "tools"), ({"reasoning": {"effort": "low"}}, "reasoning.effort")):
        body = {"model": "tiny", "input": "Hi", "max_output_tokens": 4, **more}
        answer = httpx.post(f"{keeping.url}/v1/responses", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
