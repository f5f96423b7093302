"""OpenAI response bodies: whole objects in pieces, and the chunks of a stream as ready bytes without any model in
between."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import orjson

from tandem.core.handoff import TokenLogprob
from tandem.core.lifecycle import FinishReason
from tandem.router.serving.aggregate import WholeChoices
from tandem.router.serving.choices import ChoiceUpdate
from tandem.router.serving.response_stream import TokenUsage
from tandem.router.tokenization.tokenizer import Tokenizer

PIECE_ENTRIES = 64
"""Tokens with their log-probabilities that are written at a time; with 20 alternatives each takes 0.1 ms."""


@dataclass(slots=True, kw_only=True)
class ResponseFrame:
    """Fields that every object of one answer repeats, and the options for the rest.

    `logprobs` and `prompt_logprobs` are how many alternatives, None = no log-probabilities. `prompts` are shown where
    `shows_token_ids`. Of each prompt's choices the `kept` best are shown, None = all.
    """

    id: str
    created: int
    model: str
    is_chat: bool
    prompts: Sequence[Sequence[int]]
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    wants_usage: bool = False
    shows_token_ids: bool = False
    kept: int | None = None
    wants_running_usage: bool = False
    """With every chunk: how much there is so far, over all choices."""
    names_tier: bool = False


def usage_object(usage: TokenUsage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _tier(frame: ResponseFrame) -> dict[str, str]:
    """Name the only service tier, for a request that asked for one."""
    return {"service_tier": "default"} if frame.names_tier else {}


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


class ChunkWriter:
    """Server-sent events of one answer. Only the text is encoded for each chunk; the rest is prepared once."""

    def __init__(self, frame: ResponseFrame, choice_count: int, logprobs: Logprobs) -> None:
        self._frame, self._logprobs = frame, logprobs
        kind = "chat.completion.chunk" if frame.is_chat else "text_completion"
        head = {"id": frame.id, "object": kind, "created": frame.created, "model": frame.model, **_tier(frame)}
        self._head = orjson.dumps(head)[:-1]
        opening = b'"delta":{"content":' if frame.is_chat else b'"text":'
        self._starts = [
            b"data: " + self._head + b',"choices":[{"index":%d,' % index + opening for index in range(choice_count)
        ]
        self._tail = b',"usage":null}\n\n' if frame.wants_usage else b"}\n\n"
        self._is_text_alone = frame.logprobs is None and not frame.shows_token_ids
        self._after_text = b'},"logprobs":null' if frame.is_chat else b',"logprobs":null'
        self._after_text += b',"finish_reason":null}]'
        self._is_open = [False] * choice_count
        self._choices_each = choice_count // max(1, len(frame.prompts))

    def write(self, update: ChoiceUpdate, usage: TokenUsage | None = None) -> bytes:
        """The events of one update; b"" if there is nothing to show yet. `usage` so far goes with them if given."""
        if usage is not None:
            self._tail = b',"usage":' + orjson.dumps(usage_object(usage)) + b"}\n\n"
        is_first = not self._is_open[update.index]
        if self._is_text_alone and not is_first and update.finish is None:  # as nearly always
            if not update.text:
                return b""
            return b"".join((self._starts[update.index], orjson.dumps(update.text), self._after_text, self._tail))
        self._is_open[update.index] = True
        return self._chat(update, is_first) if self._frame.is_chat else self._completion(update, is_first)

    def usage(self, usage: TokenUsage) -> bytes:
        return b"data: " + self._head + b',"choices":[],"usage":' + orjson.dumps(usage_object(usage)) + b"}\n\n"

    def _chat(self, update: ChoiceUpdate, is_first: bool) -> bytes:
        events = b""
        if is_first:
            prompt = b""
            if self._frame.shows_token_ids:
                prompt = b',"prompt_token_ids":' + orjson.dumps(list(self._prompt(update.index)))
            events = self._event(update.index, {"role": "assistant", "content": ""}, None, prompt)
        has_logprobs = self._has_logprobs(update)
        if update.text or has_logprobs or (self._frame.shows_token_ids and update.tokens):
            shown = b"".join(self._logprobs.chat(update)) if has_logprobs else b"null"
            events += self._starts[update.index] + orjson.dumps(update.text) + b'},"logprobs":' + shown
            events += b',"finish_reason":null' + self._token_ids(update) + b"}]" + self._tail
        if update.finish is not None:
            events += self._event(update.index, {}, update.finish)
        return events

    def _completion(self, update: ChoiceUpdate, is_first: bool) -> bytes:
        has_logprobs = self._has_logprobs(update)
        if not (update.text or has_logprobs or update.finish or (self._frame.shows_token_ids and update.tokens)):
            self._is_open[update.index] = not is_first
            return b""
        shown = b"".join(self._logprobs.completion(update, self._frame.logprobs)) if has_logprobs else b"null"
        event = self._starts[update.index] + orjson.dumps(update.text) + b',"logprobs":' + shown
        event += b',"finish_reason":' + orjson.dumps(update.finish) + self._token_ids(update)
        if is_first and self._frame.shows_token_ids:
            event += b',"prompt_token_ids":' + orjson.dumps(list(self._prompt(update.index)))
        return event + b"}]" + self._tail

    def _has_logprobs(self, update: ChoiceUpdate) -> bool:
        return self._frame.logprobs is not None and (update.text_tokens > 0 or update.echo is not None)

    def _token_ids(self, update: ChoiceUpdate) -> bytes:
        return b',"token_ids":' + orjson.dumps(update.tokens) if self._frame.shows_token_ids else b""

    def _prompt(self, index: int) -> Sequence[int]:
        return self._frame.prompts[index // self._choices_each]

    def _event(self, index: int, delta: dict[str, Any], finish: FinishReason | None, more: bytes = b"") -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
        return b"data: " + self._head + b',"choices":[' + orjson.dumps(choice) + b"]" + more + self._tail


class WholeAnswer:
    """Collects the updates of an answer that is not streamed."""

    def __init__(self, frame: ResponseFrame, choice_count: int, logprobs: Logprobs) -> None:
        self._frame, self._logprobs = frame, logprobs
        self._whole = WholeChoices(choice_count)

    def add(self, updates: Sequence[ChoiceUpdate]) -> None:
        self._whole.add(updates)

    def pieces(self, usage: TokenUsage) -> Iterator[bytes]:
        """The body, each piece the work of some milliseconds at most."""
        frame = self._frame
        kind = "chat.completion" if frame.is_chat else "text_completion"
        choices = self._whole.choices(len(frame.prompts), frame.kept)
        head = {"id": frame.id, "object": kind, "created": frame.created, "model": frame.model, **_tier(frame)}
        yield orjson.dumps(head)[:-1] + b',"choices":['
        each = len(choices) // len(frame.prompts)
        for place, choice in enumerate(choices):
            yield b"," if place else b""
            yield from self._choice(choice)
            if not frame.is_chat:
                yield from self._of_prompt(choice, frame.prompts[place // each])
            yield b"}"
        yield b'],"usage":' + orjson.dumps(usage_object(usage))
        if frame.is_chat:
            yield from self._of_prompt(choices[0], frame.prompts[0])
        yield b"}"

    def _choice(self, choice: ChoiceUpdate) -> Iterator[bytes]:
        """Without its last brace."""
        body: dict[str, Any] = {"index": choice.index, "finish_reason": choice.finish}
        if self._frame.is_chat:
            body["message"] = {"role": "assistant", "content": choice.text, "refusal": None}
        else:
            body["text"] = choice.text
        if self._frame.shows_token_ids:
            body["token_ids"] = choice.tokens
        yield orjson.dumps(body)[:-1] + b',"logprobs":'
        count = self._frame.logprobs
        if count is None:
            yield b"null"
        elif self._frame.is_chat:
            yield from self._logprobs.chat(choice)
        else:
            yield from self._logprobs.completion(choice, count)

    def _of_prompt(self, choice: ChoiceUpdate, prompt: Sequence[int]) -> Iterator[bytes]:
        """Write the requested fields about the prompt of a choice, behind other fields."""
        if self._frame.shows_token_ids:
            yield b',"prompt_token_ids":' + orjson.dumps(list(prompt))
        count = self._frame.prompt_logprobs
        if count is not None:
            yield b',"prompt_logprobs":'
            yield from self._logprobs.prompt(choice.prompt_logprobs or (), count)
