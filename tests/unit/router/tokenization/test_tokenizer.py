"""Test tokenizers, among them those of GGUF files."""

import asyncio
import itertools
import json
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as HubTokenizer

from tandem.core.errors import InvalidRequestError, ModelError
from tandem.core.gguf.file import GgufFile
from tandem.core.gguf.text_splits import SPLITTINGS
from tandem.core.gguf.tokenizer_json import special_tokens
from tandem.core.gguf.tokens import TokenType, end_token_ids
from tandem.router.tokenization.gguf_tokenizer import build_tokenizer
from tandem.router.tokenization.tokenizer import LONG_TEXT_CHARS, Tokenizer
from tools.gguf_model import write_gguf

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


BUNDLED = Path(__file__).parents[4] / "models" / "tandem-tiny"
GGUF_TEXTS = [
    "", "Hello, world!", "  leading", "trailing  ", "\n\n\t tab\r\n  x", "don't I'LL THEY'RE we've", "1234567890 3.14",
    "日本語のテキスト、中文，测试。", "한국어 العربية עברית हिन्दी ไทย Ελληνικά Русский", "🙂👨‍👩‍👧‍👦🏳️‍🌈 e\u0301 é",
    "½ ² Ⅷ ٣",
    "def f(x):\n\treturn x ** 2  # ok\n", "<|user|> inside <|bos|>", "https://x.y/z?a=b&c=%20", "\u200b\ufeff\x00\x7f",
    "a" * 100, " " * 50, "CamelCaseWords HTTPServer iPhone", "foo_bar/baz\\n", "𝕬𝖇𝖈 ﬁ ǅ",
]  # fmt: skip


def drawn_texts(alphabet: str, count: int = 300) -> list[str]:
    drawn = random.Random(3)
    return ["".join(drawn.choice(alphabet) for _ in range(drawn.randint(1, 40))) for _ in range(count)]


@pytest.fixture(scope="module")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(BUNDLED, path)
    return path


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., GgufFile]:
    """A file with these entries behind `tokenizer.`, and nothing else."""

    def made(**values: Any) -> GgufFile:
        writer = gguf.GGUFWriter(tmp_path / "made.gguf", "llama")
        for name, value in values.items():
            key = f"tokenizer.{name.replace('__', '.')}"
            if isinstance(value, list):
                writer.add_array(key, value)
            elif isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, int):
                writer.add_int32(key, value)
            else:
                writer.add_string(key, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return GgufFile(tmp_path / "made.gguf")

    return made


def test_ids_and_chats_are_those_of_the_tokenizer_json(bundled: Path) -> None:
    ours, theirs = Tokenizer.load(bundled), Tokenizer.load(BUNDLED)
    assert (ours.vocab_size, ours.context_tokens) == (theirs.vocab_size, theirs.context_tokens)
    for text in GGUF_TEXTS + drawn_texts("abc XY 12 é日🙂\n\t<|user|>"):
        assert ours.encode_now(text) == theirs.encode_now(text), text
        ids = ours.encode_now(text, add_special_tokens=False)
        assert ids == theirs.encode_now(text, add_special_tokens=False), text
        assert ours.decode(ids) == theirs.decode(ids)
        assert [ours.token_bytes(token) for token in ids] == [theirs.token_bytes(token) for token in ids]
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "ç"}]
    assert ours.render_chat(chat) == theirs.render_chat(chat)


def test_a_tokenizer_json_beside_the_file_wins(bundled: Path, tmp_path: Path) -> None:
    shutil.copyfile(bundled, tmp_path / "tiny.gguf")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(BUNDLED / name, tmp_path / name)
    assert Tokenizer.load(tmp_path / "tiny.gguf").encode_now("Hi") == Tokenizer.load(BUNDLED).encode_now("Hi")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json is no tokenizer"):
        Tokenizer.load(tmp_path / "tiny.gguf")
    (tmp_path / "tokenizer.json").unlink()
    assert Tokenizer.load(tmp_path / "tiny.gguf").encode_now("Hi", add_special_tokens=False)


def pre_tokenizer(name: str) -> Any:
    """The split of that name, by the tokenizers library."""
    hub = json.loads(HubTokenizer(models.BPE()).to_str())
    return HubTokenizer.from_str(json.dumps({**hub, "pre_tokenizer": SPLITTINGS[name].pre_tokenizer()})).pre_tokenizer


def test_names_of_splits_mean_what_transformers_takes_them_for() -> None:
    theirs = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping").GGUF_PRE_TOKENIZER_SPLITS
    texts = GGUF_TEXTS + drawn_texts("aB'sRE 12٣é日🙂\n\r\t/._-½ ")
    compared = set(theirs) & set(SPLITTINGS)
    assert {"llama-bpe", "qwen2", "tekken", "gpt-4o"} <= compared
    for name in compared:
        cut = pre_tokenizers.Split(Regex(theirs[name]), behavior="isolated")
        want = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        ours = pre_tokenizer(name)
        for text in texts:
            assert ours.pre_tokenize_str(text) == want.pre_tokenize_str(text), (name, text)


@pytest.mark.parametrize("name", ["smollm", "deepseek-v3", "deepseek-coder", "gpt-2"])
def test_splits_lose_nothing(name: str) -> None:
    byte_of = dict(zip(*_alphabet(), strict=True))
    for text in GGUF_TEXTS + drawn_texts("aB'sRE 12٣é日🙂\n\r\t/._-½ "):
        pieces = [piece for piece, _ in pre_tokenizer(name).pre_tokenize_str(text)]
        assert bytes(byte_of[char] for piece in pieces for char in piece).decode() == text
    digits = [piece for piece, _ in pre_tokenizer("smollm").pre_tokenize_str("a 123")]
    assert digits == ["a", "Ġ", "1", "2", "3"]


def _alphabet() -> tuple[str, list[int]]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    chars = "".join(map(chr, printable)) + "".join(chr(256 + place) for place in range(len(others)))
    return chars, printable + others


SPECIALS = [("<unk>", TokenType.UNKNOWN), ("<s>", TokenType.CONTROL), ("</s>", TokenType.CONTROL)]
BYTES = [(f"<0x{byte:02X}>", TokenType.BYTE) for byte in range(256)]


def sentence_piece(pieces: list[str], *, users: list[str] | None = None, **more: Any) -> dict[str, Any]:
    """A vocabulary in which earlier pieces merge first."""
    typed = [*SPECIALS, *BYTES, *((text, TokenType.USER_DEFINED) for text in users or [])]
    typed += [(text, TokenType.NORMAL) for text in pieces]
    scores = [0.0] * (len(typed) - len(pieces)) + [-float(place) for place in range(len(pieces))]
    return {
        "ggml__model": "llama", "ggml__tokens": [text for text, _ in typed], "ggml__scores": scores,
        "ggml__token_type": [int(kind) for _, kind in typed], "ggml__bos_token_id": 1, "ggml__eos_token_id": 2,
        "ggml__unknown_token_id": 0, **more,
    }  # fmt: skip


def merged(text: str, vocab: dict[str, int], scores: list[float]) -> list[int]:
    """The rule of SentencePiece itself: the pair of the best score, the leftmost of several, until there is none."""
    parts = list(text)
    while True:
        joined = [(-scores[vocab[a + b]], place) for place, (a, b) in enumerate(itertools.pairwise(parts))
                  if a + b in vocab]  # fmt: skip
        if not joined:
            break
        place = min(joined)[1]
        parts[place : place + 2] = ["".join(parts[place : place + 2])]
    found: list[int] = []
    for part in parts:
        found += [vocab[part]] if part in vocab else [3 + byte for byte in part.encode()]
    return found


def _pieces() -> list[str]:
    drawn = random.Random(11)
    letters = ["▁", *"abcdé"]
    found = dict.fromkeys(letters)
    while len(found) < 120:
        known = list(found)
        found["".join(drawn.choices(known, k=2))] = None
    merges = [text for text in found if len(text) > 1]
    return [text for text in merges if len(text) < 12] + letters


def test_sentence_pieces_are_merged_by_their_scores(write: Callable[..., GgufFile]) -> None:
    values = sentence_piece(_pieces())
    hub = build_tokenizer(write(**values).metadata)
    vocab = {text: number for number, text in enumerate(values["ggml__tokens"]) if number >= 259}
    for text in [*drawn_texts("abcdé  z日"), "", " a", "a b", "<s>"]:
        want = merged(("▁" + text).replace(" ", "▁"), vocab, values["ggml__scores"]) if text else []
        if "<s>" not in text:
            assert hub.encode(text).ids == [1, *want], text
            assert hub.decode(hub.encode(text).ids) == text, text
    assert hub.encode("<s>").ids == [1, 1]
    assert hub.token_to_id("<0x41>") == 3 + 0x41


def test_blanks_of_users_are_whole_and_no_blank_is_put_before(write: Callable[..., GgufFile]) -> None:
    """As in Gemma's files: runs of blanks are tokens of users."""
    values = sentence_piece(
        ["▁a", "ab", "▁", "a", "b"], users=["  ", "   ", "\n\n"], ggml__add_space_prefix=False,
        ggml__add_eos_token=True,
    )  # fmt: skip
    hub = build_tokenizer(write(**values).metadata)
    number = {text: place for place, text in enumerate(values["ggml__tokens"])}
    cases = {"ab": ["ab"], " ab": ["▁a", "b"], "a   b": ["a", "   ", "b"], "a\n\n▁ b": ["a", "\n\n", "  ", "b"]}
    for text, want in cases.items():
        assert hub.encode(text).ids == [1, *(number[one] for one in want), 2], text
    assert hub.decode(hub.encode("a   b").ids) == "a   b"


def byte_level(**more: Any) -> dict[str, Any]:
    tokens = [*sorted(_alphabet()[0]), "ab", "<|im_end|>", "<think>", "<|endoftext|>", "[PAD0]"]
    types = [1] * 257 + [3, 4, 3, 5]
    return {
        "ggml__model": "gpt2", "ggml__pre": "llama-bpe", "ggml__tokens": tokens, "ggml__token_type": types,
        "ggml__merges": ["a b"], "ggml__bos_token_id": 259, "ggml__eos_token_id": 257, **more,
    }  # fmt: skip


def test_tokens_of_chats_and_of_users_are_whole(write: Callable[..., GgufFile]) -> None:
    hub = build_tokenizer(write(**byte_level()).metadata)
    assert hub.encode("ab<think>[PAD0]<|im_end|>").ids[:3] == [259, 256, 258]
    assert hub.encode("<|im_end|>").ids == [259, 257]
    assert hub.decode([256, 258, 257]) == "ab<think>"
    plain = build_tokenizer(write(**byte_level(ggml__add_bos_token=False)).metadata)
    assert plain.encode("ab").ids == [256]


def test_ends_are_those_named_and_those_that_chats_are_known_by(write: Callable[..., GgufFile]) -> None:
    metadata = write(**byte_level(ggml__eot_token_id=258)).metadata
    assert end_token_ids(metadata) == (257, 258, 259)
    assert special_tokens(metadata) == {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    assert end_token_ids(write(**byte_level(ggml__eos_token_id=-1)).metadata) == (257, 259)
    with pytest.raises(ModelError, match="eos_token_id cannot be used: it is 9999, and there are 261 tokens"):
        end_token_ids(write(**byte_level(ggml__eos_token_id=9999)).metadata)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no model": ({"ggml__tokens": ["a"]}, r"ggml\.model cannot be used: it is missing"),
    "another model": ({"ggml__model": "bert"}, "it is 'bert', and gpt2 and llama are read"),
    "no tokens": ({"ggml__model": "gpt2", "ggml__pre": "gpt-2"}, "there is no token"),
    "no split": (byte_level(ggml__pre=""), r"ggml\.pre cannot be used: it is missing"),
    "an old split": (byte_level(ggml__pre="default"), "it is 'default', and says nothing of how text is cut"),
    "types of others": (byte_level(ggml__token_type=[1, 1]), "it has 2 elements, and there are 261 tokens"),
    "tokens twice": (byte_level(ggml__tokens=["a"] * 261), "some of them are the same"),
    "a merge of one": (byte_level(ggml__merges=["ab"]), "one of them has not two parts"),
    "a merge of three": (byte_level(ggml__merges=["a b c"]), "one of them has not two parts"),
    "a merge of no token": (byte_level(ggml__merges=["a zz"]), "they make no tokenizer"),
    "no scores": (sentence_piece(["a"]) | {"ggml__scores": [0.5]}, "it has 1 elements, and there are 260 tokens"),
    "a token without end": (sentence_piece(["a" * 2000]), "one has 2000 characters"),
    "a start beyond": (byte_level(ggml__bos_token_id=5000), "it is 5000, and there are 261 tokens"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_makes_no_tokenizer_is_named(name: str, write: Callable[..., GgufFile]) -> None:
    values, why = REFUSED[name]
    with pytest.raises(ModelError, match=why) as caught:
        build_tokenizer(write(**values).metadata)
    assert "\n" not in caught.value.message
    assert "tokenizer.json beside the file" in caught.value.message or "again" in caught.value.message
