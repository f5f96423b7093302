"""Test chat templates, hostile ones too."""

import asyncio
import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from tandem.core.errors import InvalidRequestError, ModelError
from tandem.router.tokenization import chat_template, template_sandbox
from tandem.router.tokenization.chat_template import (
    MAX_VARIABLES_BYTES,
    MAX_VARIABLES_DEPTH,
    THOUGHT_NAMES,
    ChatTemplate,
    Rendering,
    UnendingTemplateError,
    check_variables,
)
from tandem.router.tokenization.tokenizer import Tokenizer
from tests.plugins.costs import measured

MODEL = Path(__file__).parents[4] / "models" / "tandem-tiny"
KEEPS = """\
{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}
{% if add_generation_prompt %}<assistant>{% endif %}"""
TRIMS = KEEPS.replace("m.content", "m.content | trim")
READS = """\
{%- if mood is not defined %}{% set mood = 'calm' %}{% endif %}
{{ bos_token }}{{ mood }}{{ rules | default({}) | tojson }}{{ messages[-1].content }}"""
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Once upon"}],
    [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": " Once upon a time, "}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "x"}, {"role": "assistant", "content": "x"}],
]


@pytest.fixture(scope="module")
def theirs() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(str(MODEL))


def with_template(folder: Path, source: str) -> Tokenizer:
    path = folder / "given.jinja"
    path.write_text(source)
    return Tokenizer.load(MODEL, path)


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("source", [KEEPS, TRIMS, None])
def test_continues_the_last_message_as_transformers_does(
    tmp_path: Path, theirs: Any, source: str | None, chat: Any
) -> None:
    ours = with_template(tmp_path, source) if source else Tokenizer.load(MODEL)
    before = json.dumps(chat)
    expected = theirs.apply_chat_template(chat, chat_template=source, tokenize=False, continue_final_message=True)
    rendering = Rendering(adds_prompt=False, continues_last=True)
    assert ours.render_chat(chat, rendering) == expected
    assert expected.rstrip().endswith(chat[-1]["content"].strip())
    assert json.dumps(chat) == before


def test_a_template_that_leaves_the_last_message_out_cannot_continue_it(tmp_path: Path) -> None:
    ours = with_template(tmp_path, "{{ messages[0].content }}")
    with pytest.raises(InvalidRequestError) as caught:
        ours.render_chat(CHATS[0], Rendering(adds_prompt=False, continues_last=True))
    assert caught.value.param == "continue_final_message"


def test_without_the_generation_prompt(theirs: Any) -> None:
    ours = Tokenizer.load(MODEL).render_chat(CHATS[0], Rendering(adds_prompt=False))
    assert ours == theirs.apply_chat_template(CHATS[0], tokenize=False, add_generation_prompt=False)
    assert ours != theirs.apply_chat_template(CHATS[0], tokenize=False, add_generation_prompt=True)


def test_variables_reach_the_template(tmp_path: Path, theirs: Any) -> None:
    ours = with_template(tmp_path, READS)
    for variables in ({}, {"mood": "é"}, {"rules": {"a": [1, 2.5, None, True]}, "mood": ""}):
        expected = theirs.apply_chat_template(CHATS[0], chat_template=READS, tokenize=False, **variables)
        assert ours.render_chat(CHATS[0], Rendering(adds_prompt=False, variables=variables)) == expected


@pytest.mark.parametrize(
    "name", ["moods", "messages", "bos_token", "add_generation_prompt", "raise_exception", "tools"]
)
def test_a_variable_that_is_not_the_clients_is_refused(tmp_path: Path, name: str) -> None:
    ours = with_template(tmp_path, READS)
    with pytest.raises(InvalidRequestError, match="reads mood, rules") as caught:
        ours.render_chat(CHATS[0], Rendering(variables={name: "x"}))
    assert caught.value.param == "chat_template_kwargs"
    assert name in caught.value.message


@pytest.mark.parametrize(
    "fails",
    ["[].pop()", "1 // (messages | length - 1)", "messages[0].content.nothing.at_all", "(none).x()",
     "raise_exception('z' * 5000)"],
)  # fmt: skip
def test_however_a_template_fails_at_what_a_client_sent_it_is_the_clients(tmp_path: Path, fails: str) -> None:
    made = with_template(tmp_path, "{{ " + fails + " }}")
    with pytest.raises(InvalidRequestError, match="does not accept these messages") as failed:
        made.render_chat([{"role": "user", "content": "Hi"}])
    assert failed.value.param == "messages"
    assert len(failed.value.message) < 300


def test_a_template_that_calls_itself_for_ever_is_no_bug_of_the_router(tmp_path: Path) -> None:
    made = with_template(tmp_path, "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}")
    with pytest.raises(InvalidRequestError, match="does not accept these messages"):
        made.render_chat([{"role": "user", "content": "Hi"}])


def test_variables_are_bounded() -> None:
    nested: Any = 1
    for _ in range(MAX_VARIABLES_DEPTH - 1):
        nested = [nested]
    check_variables({"a": nested})
    deep = nested
    for _ in range(5000):
        deep = {"b": deep}
    for wrong, what in (
        ({"a": [nested]}, "deeply"),
        ({"a": deep}, "deeply"),
        ({"a": "é" * MAX_VARIABLES_BYTES}, "byt"),
        ({"a": "é" * (MAX_VARIABLES_BYTES // 2)}, "byt"),
        ({"a": [[]] * MAX_VARIABLES_BYTES}, "more than"),
        ({"a": ["a" * 100] * 200}, "more than"),
        ({str(n): 1 for n in range(MAX_VARIABLES_BYTES)}, "more than"),
    ):
        with pytest.raises(InvalidRequestError, match=what):
            check_variables(wrong)


def test_a_template_of_the_operators_takes_the_models_place(tmp_path: Path) -> None:
    shutil.copy(MODEL / "tokenizer.json", tmp_path)
    (tmp_path / "chat_template.jinja").write_text("the model's")
    (tmp_path / "mine.jinja").write_text("the operator's")
    assert Tokenizer.load(tmp_path).render_chat(CHATS[0]) == "the model's"
    assert Tokenizer.load(tmp_path, tmp_path / "mine.jinja").render_chat(CHATS[0]) == "the operator's"
    for text, what in ((None, "cannot read"), (" \n", "is empty"), ("{% if %}", "does not compile")):
        path = tmp_path / "wrong.jinja"
        if text is not None:
            path.write_text(text)
        with pytest.raises(ModelError, match=what):
            Tokenizer.load(tmp_path, path)


EVIL = [{"role": "user", "content": "evil"}]
GOOD = [{"role": "user", "content": "good"}]
R = "range(100000)"
LOOPS = {
    "loops": f"{{% for a in {R} %}}{{% for b in {R} %}}{{% endfor %}}{{% endfor %}}",
    "loops over a list": f"{{% set r = {R}|list %}}{{% for a in r %}}{{% for b in r %}}{{% endfor %}}{{% endfor %}}",
    "conditions over a list": f"{{% set r = {R}|list %}}{{% for a in r %}}"
    "{% for b in r if not b %}{% endfor %}{% endfor %}",
    "a loop that writes": f"{{% for a in {R} %}}{{% for b in {R} %}}x{{% endfor %}}{{% endfor %}}",
    "a condition": f"{{% for a in {R} if {R}|map('string')|list|length < 0 %}}{{% endfor %}}",
    "a filter": f"{{% for a in {R} %}}{{{{ {R}|map('string')|join|length }}}}{{% endfor %}}",
    "macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "a loop in itself": "{% for a in [[1]] recursive %}{% for b in range(99) %}{{ loop.index }}{{ m }}{% endfor %}"
    f"{{% for c in {R} %}}{{% for d in {R} %}}{{% endfor %}}{{% endfor %}}{{% endfor %}}",
    "a hundred filters": f"{{% for a in {R} %}}" + f"{{{{ {R}|sum }}}}" * 100 + "{% endfor %}",
}
GROWS = {
    "times": "{{ 'a' * 10**9 }}",
    "times, turned round": "{{ 10**9 * 'a' }}",
    "a list": "{{ ([1] * 10**9)|length }}",
    "powers": "{{ 9 ** (9 ** 9) }}",
    "products": "{% set n = namespace(x=3) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "doubling": "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "adding": "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "adding lists": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "a block": "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set y %}{{ n.x }}{{ n.x }}{% endset %}"
    "{% set n.x = y %}{% endfor %}",
    "center": "{{ 'a'|center(10**9) }}",
    "a method": "{{ 'a'.center(10**9) }}",
    "a width": "{{ '%01000000000d' % 1 }}",
    "a width given": "{{ '%*d' % (1000000000, 1) }}",
    "a format": "{{ '{:1000000000}'.format(1) }}",
    "a format given": "{{ '{:{}}'.format(1, 1000000000) }}",
    "the filter format": "{{ '%1000000000d'|format(1) }}",
    "joining": "{{ (['a' * 1000000] * 1000000)|join }}",
    "joining by a method": "{{ ('a' * 1000000).join(['b'] * 1000000) }}",
    "replacing": "{{ ('a' * 1000000)|replace('a', 'b' * 1000000) }}",
    "replacing by a method": "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
    "writing": f"{{% set a = 'a' * 1000000 %}}{{% for i in {R} %}}{{{{ a }}}}{{% endfor %}}",
}


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "LONG_RENDER_S", 0.1)
    monkeypatch.setattr(ChatTemplate.render, "__kwdefaults__", {"limit_s": 0.1})


@pytest.mark.parametrize("source", {**LOOPS, **GROWS}.values(), ids={**LOOPS, **GROWS}.keys())
def test_a_template_that_does_not_end_is_an_error_at_start(source: str) -> None:
    began_s = time.process_time()
    with pytest.raises(ModelError, match="the chat template does not end"):
        ChatTemplate(source, {})
    assert time.process_time() - began_s < 10.0  # and not for ever


@pytest.mark.parametrize("name", ["loops", "macros", "doubling", "times"])
async def test_one_that_does_not_end_for_some_chat_is_that_requests_error(tmp_path: Path, name: str) -> None:
    """And the loop goes on meanwhile, and the next request works."""
    source = (
        "{% if messages[0].content == 'evil' %}" + {**LOOPS, **GROWS}[name] + "{% endif %}{{ messages[0].content }}"
    )
    tokenizer = model_with_template(tmp_path, source)
    with measured(asyncio.get_running_loop()) as cost, pytest.raises(UnendingTemplateError) as found:
        await tokenizer.encode_chat(EVIL)
    cost.check_turn()
    assert (found.value.code, found.value.param) == ("invalid_request", "messages")
    assert await tokenizer.encode_chat(GOOD) == tokenizer.encode_now("good", add_special_tokens=False)


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("{% for m in messages if m.role == 'user' %}{{ loop.index ~ ':' ~ m.content }}{% endfor %}", "1:good"),
        ("{% for a in [] %}{% else %}none{% endfor %}", "none"),
        ("{% for a in [1, [2, [3]]] recursive %}{{ loop(a) if a is iterable else a }}{% endfor %}", "123"),
        ("{% for a in range(5) %}{% if a == 3 %}{% break %}{% endif %}{{ a }}{% endfor %}", "012"),
        ("{% macro m(n) %}{{ n }}{% endmacro %}{{ m(1700000000) }}{{ '%d' % 1700000000 }}", "17000000001700000000"),
        ("{{ 'at {}'.format(1700000000) }}{{ messages[0].content|upper|replace('O', '0') }}", "at 1700000000G00D"),
        ("{{ 2 ** 10 + 3 * 4 }}{{ 'ab' * 2 }}{{ '-'.join(['a', 'b']) }}{{ [1, 2]|join(', ') }}", "1036ababa-b1, 2"),
        (
            "{{ 'a' + 'b' + 'c' + messages[0].role }}{{ 1 + 2 + 3 }}{{ [1] + [2] + [3] }}{{ 'a' + 'b' * (1 + 2) }}",
            "abcuser6[1, 2, 3]abbb",
        ),
        (
            "{{ 1 + 2 }}{% macro m(n) %}{{ n + '!' }}{% endmacro %}{{ m('a' + 'b') + m('c') }}{{ [1] + [2] }}",
            "3ab!c![1, 2]",
        ),
        ("{% set one %}{{ 'a' + 'b' }}{% endset %}{{ one + one }}{{ 'x' if one == 'ab' }}", "ababx"),
        ("{{ none ~ 1 ~ true }}{{ messages[0]|tojson }}", 'None1True{"role": "user", "content": "good"}'),
        (
            "{{ messages|map(attribute='content')|join('|') }}{{ 'x'|center(5)|trim }}{{ 'a'|indent(2, true) }}",
            "goodx  a",
        ),
    ],
)
def test_what_honest_templates_do_is_as_before(source: str, shown: str) -> None:
    assert ChatTemplate(source, {}).render(GOOD) == shown


def test_a_large_chat_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate("{% for m in messages %}{{ '<' + m.role + '>' + m.content ~ '\n' }}{% endfor %}", {})
    text = template.render([{"role": "user", "content": "a" * 500}] * 8192, limit_s=60)
    assert len(text) == 8192 * 508 - 8192
    monkeypatch.setattr(template_sandbox, "MAX_SIZE", 1000)
    with pytest.raises(InvalidRequestError, match="makes too much"):
        template.render([{"role": "user", "content": "a" * 500}] * 3)


def test_long_texts_of_all_characters_come_out_as_they_went_in() -> None:
    template = ChatTemplate("{% for m in messages %}{{ '<' + m.role + '>' }}{{ m.content + '|' }}{% endfor %}", {})
    long = "a\u00e9\u4e2d\U0001f600\ud800" * 100_000
    text = template.render([{"role": "user", "content": content} for content in (long, "b\udfff", long)], limit_s=60)
    assert text == f"<user>{long}|<user>b\udfff|<user>{long}|"


def test_texts_and_numbers_are_not_added() -> None:
    for source in (
        "{{ 'a' + 'b' + (messages|length if messages[0].content == 'good' else 'c') }}",
        "{{ messages[0].role + messages|length }}",
    ):
        with pytest.raises(InvalidRequestError, match="can only concatenate str"):
            ChatTemplate(source, {}).render(GOOD)


def model_with_template(folder: Path, source: str) -> Any:
    shutil.copytree(MODEL, folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(source)
    return Tokenizer.load(folder / "model")


CALL: dict[str, Any] = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1, "b": "x'}}
TURN: list[dict[str, Any]] = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "?"},
]
CALLS = """\
{%- for m in messages %}{% if m.tool_calls %}
{%- for c in m.tool_calls %}<{{ c.function.name }}:{{ WRITTEN }}>{% endfor %}
{%- else %}{{ m.content }}{% endif %}{% endfor %}"""


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("c.function.arguments", '{"a": 1, "b": "x'),
        ("c.function.arguments | tojson", json.dumps(CALL["function"]["arguments"])),
        ("c.function.arguments.items() | list", "[('a', 1)]"),
    ],
)
def test_arguments_that_are_no_object_are_shown_as_far_as_the_template_can(written: str, shown: str) -> None:
    template = ChatTemplate(CALLS.replace("WRITTEN", written), {})
    assert template.render(TURN) == f"Hi<f:{shown}>?"


def test_a_call_in_front_of_others_needs_what_a_template_reads_of_it() -> None:
    """The templates of some models write the last message in another way than the others."""
    source = """\
{%- for m in messages %}
{%- if loop.last %}{{ m.content }}{% else %}{{ m.content.split('</think>')[-1] }}{% endif %}
{%- for c in m.tool_calls %}<{{ c.function.name }}:{{ c.function.arguments | tojson }}>{% endfor %}{% endfor %}"""
    call = {**CALL, "function": {"name": "f", "arguments": "{}"}}
    assert ChatTemplate(source, {}).render([TURN[0], {**TURN[1], "tool_calls": [call]}, TURN[2]]) == "Hi<f:{}>?"


def test_thoughts_and_content_are_joined_where_a_template_objects_to_both() -> None:
    """Its own models write both beside calls, and clients send such an answer back."""
    source = """\
{%- for m in messages %}{% if m.tool_calls and m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}
{{- m.thinking or '' }}|{{ m.content or '' }}
{%- for c in m.tool_calls %}<{{ c.function.name }}>{% endfor %}{% endfor %}"""
    template = ChatTemplate(source, {})
    thoughts = dict.fromkeys(THOUGHT_NAMES, "Hm.")
    for content, expected in (("I look.", "Hm.\n\nI look.|<f>"), (None, "Hm.|<f>")):
        assert template.render([{**TURN[1], **thoughts, "content": content}]) == expected
    assert template.render([{**TURN[1], "content": "I look."}]) == "|I look.<f>"
    assert template.render([{"role": "assistant", "content": "So.", **thoughts}]) == "Hm.|So."
    quiet = source.replace("{{ raise_exception('both') }}", "")
    loses = quiet.replace("in m.tool_calls %}", "in m.tool_calls if not m.content %}")
    assert ChatTemplate(loses, {}).render([{**TURN[1], **thoughts, "content": "I look."}]) == "Hm.|I look."
