"""The router's tokenizer against transformers, on the bundled model and on hand-made templates."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from tandem.core.errors import InvalidRequestError, ModelError
from tandem.router.tokenization.tokenizer import LONG_TEXT_CHARS, Tokenizer

MODEL = Path(__file__).parents[4] / "models" / "tandem-tiny"
TEXTS = [
    "",
    "Hello, world!",
    "  leading",
    "héllo 你好 🎉\u200d",
    "def f(x):\n\treturn x\n",
    "<|user|> inside",
    "\x00\x7f",
]
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": " Be kind. "}, {"role": "user", "content": "Hi"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "ç\n"}],
]


@pytest.fixture(scope="module")
def ours() -> Tokenizer:
    return Tokenizer.load(MODEL)


@pytest.fixture(scope="module")
def theirs() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(str(MODEL))


@pytest.mark.parametrize("text", TEXTS)
def test_encodes_like_transformers(ours: Tokenizer, theirs: Any, text: str) -> None:
    assert ours.encode_now(text) == theirs(text)["input_ids"]
    plain = theirs(text, add_special_tokens=False)["input_ids"]
    assert ours.encode_now(text, add_special_tokens=False) == plain
    assert ours.decode(plain) == theirs.decode(plain, skip_special_tokens=True)


@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_long_texts_give_the_same_ids(ours: Tokenizer, theirs: Any, add_special_tokens: bool) -> None:
    text = "".join(TEXTS) * (LONG_TEXT_CHARS // 10)
    expected = theirs(text, add_special_tokens=add_special_tokens)["input_ids"]
    assert ours.encode_now(text, add_special_tokens=add_special_tokens) == expected


@pytest.mark.parametrize("count", [1, LONG_TEXT_CHARS])
def test_lone_surrogates_are_refused(ours: Tokenizer, count: int) -> None:
    with pytest.raises(InvalidRequestError, match="no valid Unicode text: it has a lone surrogate"):
        ours.encode_now("\ud800" * count)


def test_a_long_text_leaves_the_interpreter_to_others(ours: Tokenizer) -> None:
    """Streams go on while another thread tokenises."""
    numbers = random.Random(1)
    text = " ".join(str(numbers.randrange(10**8)) for _ in range(60_000))
    is_over = threading.Event()

    def encode() -> None:
        ours.encode_now(text)
        is_over.set()

    thread = threading.Thread(target=encode)
    thread.start()
    turns = 0
    while not is_over.wait(0.0005):
        turns += 1
    thread.join()
    assert turns > 10, "it ran in one piece"


@pytest.mark.parametrize("chat", CHATS)
def test_renders_chats_like_transformers(ours: Tokenizer, theirs: Any, chat: Any) -> None:
    assert ours.render_chat(chat) == theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    expected = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert asyncio.run(ours.encode_chat(chat)) == expected


TEMPLATE = """\
{%- if messages[0].role != 'user' %}{{ raise_exception('start with the user') }}{% endif %}
{{ bos_token }}
{% for m in messages %}
    {% if loop.index > 2 %}{% break %}{% endif %}
    {% generation %}[{{ m.role }}|{{ m.content | tojson }}|{{ {'ü': 1} | tojson(indent=1) }}]{% endgeneration %}
{% endfor %}
{{ strftime_now('%Y') | length }}
{% if add_generation_prompt %}go{% endif %}
"""


@pytest.mark.parametrize("as_file", [True, False])
def test_other_templates(tmp_path: Path, theirs: Any, as_file: bool) -> None:
    shutil.copy(MODEL / "tokenizer.json", tmp_path)
    settings = json.loads((MODEL / "tokenizer_config.json").read_text())
    settings["bos_token"] = {"__type": "AddedToken", "content": "<|bos|>"}
    settings.pop("chat_template")
    if as_file:
        (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    else:
        settings["chat_template"] = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "x"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer.load(tmp_path)
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": 'a "quoted" <b>', "name": None},
        {"role": "assistant", "content": "ok"},
    ]
    expected = theirs.apply_chat_template(chat, chat_template=TEMPLATE, tokenize=False, add_generation_prompt=True)
    assert tokenizer.render_chat(chat) == expected
    with pytest.raises(InvalidRequestError, match="start with the user") as caught:
        tokenizer.render_chat([{"role": "system", "content": "x"}])
    assert caught.value.param == "messages"


def test_sandbox(tmp_path: Path) -> None:
    shutil.copy(MODEL / "tokenizer.json", tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(InvalidRequestError):
        Tokenizer.load(tmp_path).render_chat([{"role": "user", "content": "x"}])


def test_long_texts_and_no_template(ours: Tokenizer, tmp_path: Path) -> None:
    text = "word " * LONG_TEXT_CHARS
    assert asyncio.run(ours.encode(text)) == ours.encode_now(text)
    shutil.copy(MODEL / "tokenizer.json", tmp_path)
    with pytest.raises(InvalidRequestError, match="cannot chat"):
        Tokenizer.load(tmp_path).render_chat(CHATS[0])


def test_broken_folders(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="no tokenizer"):
        Tokenizer.load(tmp_path)
    shutil.copy(MODEL / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(ModelError, match="is no JSON"):
        Tokenizer.load(tmp_path)


def test_token_bytes_add_up(ours: Tokenizer) -> None:
    text = "héllo 你好 🎉 x\n"
    tokens = ours.encode_now(text, add_special_tokens=False)
    assert b"".join(ours.token_bytes(token) for token in tokens).decode() == text
    assert ours.token_bytes(0) == b"<|bos|>"
