"""Continuing a message, leaving the generation prompt out, and clients' own variables, against transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tandem.core.errors import InvalidRequestError, ModelError
from tandem.router.tokenization.chat_template import (
    MAX_VARIABLES_BYTES,
    MAX_VARIABLES_DEPTH,
    Rendering,
    check_variables,
)
from tandem.router.tokenization.tokenizer import Tokenizer

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
