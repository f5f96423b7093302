"""Log-probabilities of tokens in the shapes of OpenAI's APIs, as pieces of JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

import orjson

from tandem.core.handoff import TokenLogprob
from tandem.router.serving.choices import ChoiceUpdate
from tandem.router.tokenization.tokenizer import Tokenizer

PIECE_ENTRIES = 64
"""Tokens with their log-probabilities that are written at a time; with 20 alternatives each takes 0.1 ms."""


class Logprobs:
    """Log-probabilities in the shapes of both APIs, as pieces of JSON: each is the work of some milliseconds."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def chat(self, update: ChoiceUpdate) -> Iterator[bytes]:
        yield b'{"content":'
        yield from _listed(map(self._chat_token, islice(update.logprobs, update.text_tokens)))
        yield b',"refusal":null}'

    def completion(self, update: ChoiceUpdate, count: int | None = None) -> Iterator[bytes]:
        """With those of the prompt in front, at most `count` alternatives each, if the text has it in front too."""
        logprobs = update.logprobs[: update.text_tokens]
        echo, known = update.echo, update.prompt_logprobs
        columns: dict[str, list[Iterable[Any]]] = {
            "tokens": [map(self._text, (logprob.token for logprob in logprobs))],
            "token_logprobs": [(logprob.logprob for logprob in logprobs)],
            "top_logprobs": [map(self._alternatives, logprobs)],
            "text_offset": [update.offsets[: update.text_tokens]],
        }
        if echo is not None and known is not None:
            columns["tokens"].insert(0, map(self._text, echo.tokens))
            columns["token_logprobs"].insert(0, chain((None,), (logprob.logprob for logprob in known)))
            alternatives = (self._alternatives(logprob, count) for logprob in known)
            columns["top_logprobs"].insert(0, chain((None,), alternatives))
            columns["text_offset"].insert(0, echo.offsets)
        before = b"{"
        for name, values in columns.items():
            yield before + b'"%s":' % name.encode()
            yield from _listed(chain(*values))
            before = b","
        yield b"}"

    def prompt(self, known: Sequence[TokenLogprob], count: int) -> Iterator[bytes]:
        """By token id: the prompt's own token first, then the best `count`; nothing precedes the first token."""
        entries = ({str(token): entry for token, entry in self._ranked(each, count)} for each in known)
        return _listed(chain((None,), entries))

    def _ranked(self, logprob: TokenLogprob, count: int) -> Iterator[tuple[int, dict[str, Any]]]:
        yield logprob.token, self._ranked_entry(logprob.token, logprob.logprob, logprob.rank)
        for place, (token, value) in enumerate(logprob.top[:count]):
            if token != logprob.token:
                yield token, self._ranked_entry(token, value, place + 1)

    def _ranked_entry(self, token: int, value: float, rank: int) -> dict[str, Any]:
        return {"logprob": value, "rank": rank, "decoded_token": self._text(token)}

    def _chat_token(self, logprob: TokenLogprob) -> dict[str, Any]:
        entry = self._entry(logprob.token, logprob.logprob)
        entry["top_logprobs"] = [self._entry(token, value) for token, value in logprob.top]
        return entry

    def _entry(self, token: int, value: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token)
        return {"token": data.decode("utf-8", "replace"), "logprob": value, "bytes": list(data)}

    def _alternatives(self, logprob: TokenLogprob, count: int | None = None) -> dict[str, float]:
        # Some clients expect the chosen token among the alternatives, as OpenAI gives it.
        return {self._text(token): value for token, value in (*logprob.top[:count], (logprob.token, logprob.logprob))}

    def _text(self, token: int) -> str:
        data = self._tokenizer.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _listed(entries: Iterable[Any]) -> Iterator[bytes]:
    """A list as JSON, PIECE_ENTRIES of it at a time."""
    rest, before = iter(entries), b"["
    while part := list(islice(rest, PIECE_ENTRIES)):
        yield before + orjson.dumps(part)[1:-1]
        before = b","
    yield b"]" if before == b"," else b"[]"
