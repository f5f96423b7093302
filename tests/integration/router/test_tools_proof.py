"""CI's slice of `make proof NAME=tools`: a few conversations of every format and of our own templates, and functions as
the leaderboard writes them."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from proof.tools.__main__ import OURS
from proof.tools.bfcl import as_sent, asking, outcome, unique
from proof.tools.conversations import Kind, conversation
from proof.tools.format_trials import FORMATS, of_format, of_template
from proof.tools.required import TOOLS, wrong_calls
from proof.tools.round_trips import Answers, is_equal
from tandem.core.output_format_names import ToolFormatName
from tandem.router.output_formats.registry import TOOLS as KNOWN

FUNCTION: dict[str, Any] = {
    "name": "geometry.area", "description": "The area.", "parameters": {"type": "dict", "properties": {
        "sides": {"type": "tuple", "items": {"type": "float"}}, "unit": {"type": "any"},
        "options": {"type": "HashMap", "properties": {"is_exact": {"type": "Boolean", "default": "no"}}},
    }, "required": ["sides"]},
}  # fmt: skip
IMPOSSIBLE: dict[str, Any] = {
    "name": "book", "description": "Books.", "parameters": {"type": "dict", "properties": {
        "count": {"type": "integer", "enum": ["1", "2"]}}, "required": ["count"]},
}  # fmt: skip


@pytest.mark.parametrize("form", FORMATS)
def test_conversations_of_a_format_come_back(form: str) -> None:
    pytest.importorskip("transformers")
    found = of_format(form, seed=5, count=2)
    assert "broken" not in found, found["broken"]
    assert found["pieces"] > 100
    found = of_template(OURS / f"{form}.jinja", seed=5, count=2)
    assert "broken" not in found, found["broken"]
    assert (found["format"], found["rendered"], found["read"]) == (form, 2, 2)


def test_a_lost_call_is_seen() -> None:
    one = next(one for n in range(99) if (one := conversation(f"{n}", Kind())).last.calls[0][1])
    answers = Answers(KNOWN[ToolFormatName.HERMES], None, one.schemas, has_tokens=False)
    assert not is_equal(one.last.calls, answers.parts([answers.tokens("No call.")]))
    assert not is_equal(
        [("f", {"a": True})], answers.parts([answers.tokens('<tool_call>{"name": "f", "arguments": {"a": 1}}')])
    )


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with asking("hermes") as client:
        yield client


def test_functions_are_accepted_or_refused_by_their_place(client: httpx.Client) -> None:
    given = list(unique(iter([FUNCTION, IMPOSSIBLE, FUNCTION])))
    assert [one["name"] for one in given] == ["geometry_area", "book"]
    sent = [as_sent(one) for one in given]
    assert sent[0]["parameters"]["properties"]["sides"] == {"type": "array", "items": {"type": "number"}}
    assert outcome(client, given, "auto")["accepted"] == 2
    refused = {"type: cannot be enforced: Invalid type: dict.": 2}
    assert outcome(client, given, "required") == {"functions": 2, "accepted": 0, "refused": refused}
    found = outcome(client, sent, "required")
    assert (found["accepted"], len(found["refused"])) == (1, 1)
    assert "required property 'count' is unsatisfiable" in str(found["refused"])


def test_calls_are_judged() -> None:
    def call(name: str, arguments: str) -> dict[str, Any]:
        return {"function": {"name": name, "arguments": arguments}}

    good = call("get_weather", '{"city": "Oslo"}')
    assert wrong_calls([good], TOOLS, "tool_calls") == ""
    assert "length" in wrong_calls([good], TOOLS, "length")
    for bad in (call("get_whether", "{}"), call("get_weather", "{}"), call("get_weather", '{"city": "Oslo'),
                call("get_weather", '{"city": "Oslo", "units": "K"}')):  # fmt: skip
        assert wrong_calls([good, bad], TOOLS, "tool_calls")


def test_an_argument_that_nothing_fits_is_named_where_arguments_are_written_one_by_one() -> None:
    """In JSON it is left out, as it is optional."""
    schema = {"type": "object", "properties": {"is_open": {"type": "boolean", "enum": ["yes", "no"]}}}
    function = {"name": "find", "description": "Finds.", "parameters": schema}
    with asking("pythonic") as client:
        refused = outcome(client, [function], "required")["refused"]
        assert list(refused) == ["is_open: cannot be enforced: Unsatisfiable schema: incompatible types."]
