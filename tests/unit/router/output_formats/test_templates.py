"""Test formats with chat templates: found in them, and conversations that are written by them and read again.

The templates here are our own, short ones. TANDEM_CHAT_TEMPLATES may name a folder with more (`*.jinja`)."""

import json
import os
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.output_format_names import ReasoningFormatName, ToolFormatName
from tandem.router.output_formats.registry import TOOLS, ModelFormats, formats_of
from tandem.router.tokenization.chat_template import ChatTemplate, Rendering
from tests.unit.router.output_formats.answers import FORMATS, SCHEMAS, cut, parse, spec_of
from tests.unit.router.output_formats.test_parser import AT_THE_BEGINNING, TEXT, VALUES

OURS = {path.stem: path for path in (Path(__file__).parent / "templates").glob("*.jinja")}
GIVEN = os.environ.get("TANDEM_CHAT_TEMPLATES")
MORE = {path.stem: path for path in sorted(Path(GIVEN).glob("*.jinja"))} if GIVEN else {}
TOOL_LIST: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "description": f"Tells {name}.", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={"city": TEXT, "days": st.integers(-9, 9), "where": st.dictionaries(st.just("lat"), VALUES, max_size=1)},
)


def chat(calls: list[tuple[str, Any]], *, content: str | None = None, is_text: bool = True) -> list[dict[str, Any]]:
    """A question, calls, and their results; arguments as text or objects."""
    ids = [f"call{number:05}" for number in range(len(calls))]
    called = [
        {"id": given, "type": "function", "function": {"name": name, "arguments": json.dumps(one) if is_text else one}}
        for given, (name, one) in zip(ids, calls, strict=True)
    ]
    results = [
        {"role": "tool", "tool_call_id": given, "name": name, "content": "It rains."}
        for given, (name, _) in zip(ids, calls, strict=True)
    ]
    answer = {"role": "assistant", "content": content, "tool_calls": called}
    return [{"role": "user", "content": "How is the weather?"}, answer, *results]


def test_every_format_has_a_template() -> None:
    assert set(OURS) == {*FORMATS}


@pytest.mark.parametrize("form", FORMATS)
def test_a_format_is_found_in_its_template(form: str) -> None:
    source = OURS[form].read_text()
    assert formats_of(source, ()).tools is TOOLS[ToolFormatName(form)]
    assert formats_of(source, (), tools=ToolFormatName.NONE).tools is None
    assert formats_of("", (), tools=ToolFormatName(form)).tools is TOOLS[ToolFormatName(form)]


def test_reasoning_is_found_in_the_template_or_the_tokens() -> None:
    def found(source: str, *tokens: str, **named: ReasoningFormatName) -> str | None:
        reasoning = formats_of(source, tokens, **named).reasoning
        return reasoning.name if reasoning else None

    assert found(OURS["hermes"].read_text()) == "think"
    assert found(OURS["harmony"].read_text()) == "harmony"
    assert found("", "<think>", "</think>") == "think"
    assert found("", "[THINK]", "[/THINK]") == "mistral"
    assert found("Hello", "<pad>") is None
    assert found("", "</think>", reasoning=ReasoningFormatName.NONE) is None
    assert found("", reasoning=ReasoningFormatName.THINK) == "think"
    assert formats_of("Hello", ()) == ModelFormats()


@pytest.fixture(scope="module")
def theirs() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(str(Path(__file__).parents[4] / "models" / "tandem-tiny"))


@pytest.mark.parametrize("form", FORMATS)
def test_conversations_with_tools_are_written_as_transformers_does(theirs: Any, form: str) -> None:
    source = OURS[form].read_text()
    calls: list[tuple[str, Any]] = [("get_weather", {"city": "Zürich <b>", "days": 3}), ("now", {})]
    specials = {name: getattr(theirs, name) for name in ("bos_token", "eos_token")}
    is_text = form == "deepseek_v3"
    for content in (None, "Let me see."):
        expected = theirs.apply_chat_template(
            chat(calls, content=content, is_text=is_text), tools=TOOL_LIST, chat_template=source, tokenize=False,
            add_generation_prompt=True,
        )  # fmt: skip
        rendered = ChatTemplate(source, specials).render(chat(calls, content=content), Rendering(tools=TOOL_LIST))
        assert rendered == expected
        assert "get_weather" in rendered


@pytest.mark.parametrize("form", FORMATS)
@given(data=st.data())
def test_what_a_template_writes_is_read_again(form: str, data: st.DataObject) -> None:
    """The calls of an answer, and content before them where the template writes it."""
    template = ChatTemplate(OURS[form].read_text(), SPECIALS)
    has_content = form not in (*AT_THE_BEGINNING, "mistral_list", "harmony")
    content = data.draw(st.none() | TEXT.map(str.strip).filter(bool)) if has_content else None
    calls = data.draw(st.lists(st.tuples(st.just("get_weather"), ARGUMENTS), min_size=1, max_size=2))
    question, answer, *_ = chat(calls, content=content)
    before = template.render([question], Rendering())
    whole = template.render([question, answer], Rendering(adds_prompt=False))
    assert whole.startswith(before)
    written = whole[len(before) :]
    for end in ("<|im_end|>\n", "<|eot_id|>", "</s>", "<｜end▁of▁sentence｜>", "<end_of_turn>\n"):
        written = written.removesuffix(end)
    parsed = parse(spec_of(form), cut(written, random.Random(data.draw(st.integers(0, 99)))))
    assert (parsed.values, parsed.content) == (calls, content or "")


@pytest.mark.parametrize("name", MORE)
def test_further_templates_write_as_transformers_does(theirs: Any, name: str) -> None:
    """Wherever that writes anything, with arguments as this template reads them."""
    source = MORE[name].read_text()
    template = ChatTemplate(source, {name: getattr(theirs, name) for name in ("bos_token", "eos_token")})
    tools = [] if name.startswith(("SmolLM3", "vllm-llama4")) else TOOL_LIST  # these read them by other names
    for content in (None, "Let me see."):
        expected = set()
        for is_text in (False, True):
            messages = chat([("get_weather", {"city": "Zürich <b>", "days": 3})], content=content, is_text=is_text)
            with suppress(Exception):  # templates fail as they like
                expected.add(
                    theirs.apply_chat_template(
                        messages, tools=tools or None, chat_template=source, tokenize=False, add_generation_prompt=True
                    )
                )
        if expected and not (name.startswith("SmolLM3") and "strftime" in source):
            assert template.render(messages, Rendering(tools=tools)) in expected
