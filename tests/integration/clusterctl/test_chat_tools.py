"""Schemas, tools and reasoning in `clusterctl chat`: what is sent, shown and asked for."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.clusterctl.exit_codes import Exit
from tests.integration.clusterctl.chat_endpoint import Endpoint, Run, chat_runner, serving
from tests.integration.clusterctl.terminal import CTRL_C, CTRL_D, Terminal
from tests.unit.clusterctl.document_check import checked

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"name": {"type": "string"}}}
WEATHER: dict[str, Any] = {"name": "get_weather", "parameters": {"type": "object"}}
CALLS = (("call_1", "get_weather", ['{"city":', ' "Rome"}']), ("call_2", "now", ["{}"]))
RESULT, PROMPT = "result of get_weather> ", "\n> "


def says(*deltas: dict[str, Any], finish: str = "stop") -> list[bytes]:
    """Events with these deltas, a finish, and the end."""
    choices = [*({"index": 0, "delta": one} for one in deltas), {"index": 0, "delta": {}, "finish_reason": finish}]
    events = [{"id": "x-1", "model": "m", "choices": [one]} for one in choices]
    return [*(f"data: {json.dumps(one)}\n\n".encode() for one in events), b"data: [DONE]\n\n"]


def calling() -> list[bytes]:
    """A thought, and two calls in pieces."""
    deltas: list[dict[str, Any]] = [{"reasoning_content": "Let me look."}]
    for index, (name, function, pieces) in enumerate(CALLS):
        head = {"index": index, "id": name, "type": "function", "function": {"name": function, "arguments": ""}}
        deltas.append({"tool_calls": [head]})
        deltas += [{"tool_calls": [{"index": index, "function": {"arguments": piece}}]} for piece in pieces]
    return says(*deltas, finish="tool_calls")


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with serving(says({"reasoning": "Well."}, {"content": "Hello"})) as found:
        yield found


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return chat_runner(capsys, monkeypatch)


def written(path: Path, content: Any) -> str:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_schema_tools_and_budget_are_sent(run: Run, endpoint: Endpoint, tmp_path: Path) -> None:
    where = ("Hi", "--url", endpoint.url, "--model", "m", "-q")
    assert run(*where)[0] == 0
    assert not {"response_format", "tools", "thinking_token_budget"} & endpoint.asked[-1].keys()
    schema = written(tmp_path / "schema.json", SCHEMA)
    tools = written(tmp_path / "tools.json", [WEATHER, {"type": "function", "function": {"name": "now"}}])
    assert run(*where, "--schema", schema, "--tools", tools, "--thinking-tokens", "9")[0] == 0
    sent = endpoint.asked[-1]
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    assert (sent["response_format"], sent["thinking_token_budget"]) == (wanted, 9)
    assert [one["function"]["name"] for one in sent["tools"]] == ["get_weather", "now"]


def test_calls_in_a_script(run: Run, endpoint: Endpoint) -> None:
    endpoint.pieces = calling()
    where = ("Hi", "--url", endpoint.url, "--model", "m")
    assert run(*where, "-q") == (0, '→ get_weather {"city": "Rome"}\n→ now {}\n', "")
    code, out, _ = run(*where, "-o", "json")
    found = checked(out, "Chat")
    assert (code, found["finish_reason"], found["reasoning"]) == (0, "tool_calls", "Let me look.")
    assert found["calls"] == [{"id": name, "name": of, "arguments": "".join(said)} for name, of, said in CALLS]


@pytest.mark.parametrize(
    ("flag", "content", "said"),
    [
        ("--schema", None, "No such file or directory. Check --schema."),
        ("--schema", "{", "it is not JSON: Expecting property name"),
        ("--schema", "[1]", "a schema must be a JSON object"),
        ("--schema", "\udcff", "it is not JSON: 'utf-8' codec"),
        ("--tools", "{}", "it must be a JSON list of tools"),
        ("--tools", "[]", "it must be a JSON list of tools"),
        ("--tools", [WEATHER, {"type": "function", "function": {}}], "tool 2 of "),
        ("--tools", ["now"], "a function needs a name"),
    ],
)
def test_files_that_cannot_be_used(run: Run, tmp_path: Path, flag: str, content: Any, said: str) -> None:
    path = tmp_path / "given.json"
    if content is not None:
        text = content if isinstance(content, str) else json.dumps(content)
        path.write_bytes(text.encode(errors="surrogateescape"))
    code, out, error = run("Hi", "--url", "http://127.0.0.1:1", "--model", "m", flag, str(path))
    assert (code, out, len(error.splitlines())) == (Exit.USAGE, "", 1)
    assert said in error


def test_the_user_plays_the_tools(endpoint: Endpoint, tmp_path: Path) -> None:
    tools = written(tmp_path / "tools.json", [WEATHER, {"name": "now"}])
    endpoint.pieces = calling()
    with Terminal("chat", "--url", endpoint.url, "--model", "m", "--tools", tools, "-q") as terminal:
        place = terminal.wait_for(PROMPT)
        terminal.type("Hi\n")
        place = terminal.wait_for('→ get_weather {"city": "Rome"}', after=place)
        place = terminal.wait_for(RESULT, after=place)
        assert "Let me look." in terminal.shown
        endpoint.pieces = says({"content": "Sunny."})
        terminal.type("21°\n")
        place = terminal.wait_for("result of now> ", after=place)
        terminal.type("noon\n")
        place = terminal.wait_for(PROMPT, after=terminal.wait_for("Sunny.", after=place))
        sent = endpoint.asked[-1]["messages"]
        assert [one["role"] for one in sent] == ["user", "assistant", "tool", "tool"]
        assert [call["function"]["arguments"] for call in sent[1]["tool_calls"]] == ['{"city": "Rome"}', "{}"]
        assert sent[1]["content"] is None
        assert [(one["tool_call_id"], one["content"]) for one in sent[2:]] == [("call_1", "21°"), ("call_2", "noon")]
        terminal.type(f"/save {tmp_path}/said.md\n")
        place = terminal.wait_for(PROMPT, after=terminal.wait_for("written: ", after=place))
        assert '## assistant\n\n→ get_weather {"city": "Rome"}\n→ now {}\n' in (tmp_path / "said.md").read_text()
        terminal.type("Bye\n")
        terminal.wait_for(PROMPT, after=place)
        assert [one["role"] for one in endpoint.asked[-1]["messages"]] == [
            *("user", "assistant", "tool", "tool", "assistant", "user")
        ]
        terminal.type("/quit\n")
        assert terminal.end() == 0


@pytest.mark.parametrize("key", [CTRL_C, CTRL_D])
def test_a_question_whose_calls_have_no_result_is_dropped(endpoint: Endpoint, tmp_path: Path, key: str) -> None:
    tools = written(tmp_path / "tools.json", [WEATHER])
    endpoint.pieces = calling()
    with Terminal("chat", "--url", endpoint.url, "--model", "m", "--tools", tools, "-q") as terminal:
        place = terminal.wait_for(PROMPT)
        terminal.type("Hi\n")
        place = terminal.wait_for(RESULT, after=place)
        endpoint.pieces = says({"content": "Hello"})
        terminal.type(key)
        place = terminal.wait_for(PROMPT, after=place)
        terminal.type("Again\n")
        terminal.wait_for(PROMPT, after=terminal.wait_for("Hello", after=place))
        assert endpoint.asked[-1]["messages"] == [{"role": "user", "content": "Again"}]
        terminal.type("/quit\n")
        assert terminal.end() == 0


@pytest.mark.parametrize("flags", [(), ("--hide-reasoning",)])
def test_reasoning_is_dim_or_hidden(endpoint: Endpoint, flags: tuple[str, ...]) -> None:
    with Terminal("chat", "Hi", "--url", endpoint.url, "--model", "m", "-q", *flags) as terminal:
        terminal.wait_for("Hello")
        assert terminal.end() == 0
        assert ("\x1b[2mWell." in terminal.shown) == (not flags)
        assert ("Well." in terminal.shown) == (not flags)
