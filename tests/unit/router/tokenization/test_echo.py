"""Where the tokens of a prompt begin in its text."""

import asyncio

import pytest

from tandem.router.serving.request_parser import echo_of, offsets_in
from tandem.router.tokenization.tokenizer import Tokenizer
from tests.integration.worker.pair import MODEL

WORDS = {1: "<s>", 2: "Hello", 3: " world", 4: "</s>"}


def decode(tokens: object) -> str:
    return "".join(WORDS[token] for token in tokens)  # type: ignore[attr-defined]


def test_what_the_tokenizer_puts_around_a_text_is_at_its_ends() -> None:
    assert offsets_in("Hello world", [1, 2, 3, 4], decode) == [0, 0, 5, 11]
    assert offsets_in("<s>Hello world</s>", [1, 2, 3, 4], decode) == [0, 3, 8, 14]


@pytest.mark.parametrize("text", ["plain words", "naïve 🎉 東京", " spaces  and\nlines\t", "x" * 3000])
def test_of_the_bundled_tokenizer(text: str) -> None:
    tokenizer = Tokenizer.load(MODEL)
    tokens = tokenizer.encode_now(text)
    echo = asyncio.run(echo_of(text, tokens, tokenizer, wants_offsets=True))
    assert echo.text == text
    assert len(echo.offsets) == len(tokens)
    assert (tokenizer.token_bytes(tokens[0]), echo.offsets[0]) == (b"<|bos|>", 0)
    for token, offset in zip(tokens[1:], echo.offsets[1:], strict=True):
        try:
            word = tokenizer.token_bytes(token).decode()
        except UnicodeDecodeError:  # a part of a character
            assert text[offset] > "\x7f"
        else:
            assert text.startswith(word, offset)
    of_ids = asyncio.run(echo_of(tokens, tokens, tokenizer, wants_offsets=True))
    assert of_ids.text == f"<|bos|>{text}"
    assert list(of_ids.offsets)[1:] == [7 + offset for offset in echo.offsets[1:]]
