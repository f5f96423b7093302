"""OpenAI response bodies: whole objects, and the chunks of a stream as ready bytes without any model in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from tandem.core.handoff import TokenLogprob
from tandem.core.lifecycle import FinishReason
from tandem.router.answers import ChoiceUpdate, Usage
from tandem.router.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What every object of one answer repeats."""

    id: str
    created: int
    model: str
    is_chat: bool
    has_logprobs: bool
    wants_usage: bool = False


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


class Logprobs:
    """Log-probabilities in the shapes of both APIs."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def chat(self, update: ChoiceUpdate) -> dict[str, Any]:
        logprobs = update.logprobs[: update.text_tokens]
        return {"content": [self._chat_token(logprob) for logprob in logprobs], "refusal": None}

    def completion(self, update: ChoiceUpdate) -> dict[str, Any]:
        logprobs = update.logprobs[: update.text_tokens]
        return {
            "tokens": [self._text(logprob.token) for logprob in logprobs],
            "token_logprobs": [logprob.logprob for logprob in logprobs],
            "top_logprobs": [self._alternatives(logprob) for logprob in logprobs],
            "text_offset": update.offsets[: len(logprobs)],
        }

    def _chat_token(self, logprob: TokenLogprob) -> dict[str, Any]:
        entry = self._entry(logprob.token, logprob.logprob)
        entry["top_logprobs"] = [self._entry(token, value) for token, value in logprob.top]
        return entry

    def _entry(self, token: int, value: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token)
        return {"token": data.decode("utf-8", "replace"), "logprob": value, "bytes": list(data)}

    def _alternatives(self, logprob: TokenLogprob) -> dict[str, float]:
        # Some clients expect the chosen token among the alternatives, as OpenAI gives it.
        return {self._text(token): value for token, value in (*logprob.top, (logprob.token, logprob.logprob))}

    def _text(self, token: int) -> str:
        data = self._tokenizer.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class ChunkWriter:
    """Server-sent events of one answer. Only the text is encoded for each chunk; the rest is prepared once."""

    def __init__(self, frame: Frame, choice_count: int, logprobs: Logprobs) -> None:
        self._frame, self._logprobs = frame, logprobs
        kind = "chat.completion.chunk" if frame.is_chat else "text_completion"
        head = {"id": frame.id, "object": kind, "created": frame.created, "model": frame.model}
        self._head = orjson.dumps(head)[:-1]
        opening = b'"delta":{"content":' if frame.is_chat else b'"text":'
        self._starts = [
            b"data: " + self._head + b',"choices":[{"index":%d,' % index + opening for index in range(choice_count)
        ]
        self._tail = b',"usage":null}\n\n' if frame.wants_usage else b"}\n\n"
        self._has_role = [not frame.is_chat] * choice_count

    def write(self, update: ChoiceUpdate) -> bytes:
        """The events of one update; b"" if there is nothing to show yet."""
        events = b""
        if not self._has_role[update.index]:
            self._has_role[update.index] = True
            events = self._event(update.index, {"role": "assistant", "content": ""}, None)
        has_logprobs = self._frame.has_logprobs and update.text_tokens > 0
        is_last = update.finish is not None
        if self._frame.is_chat:
            if update.text or has_logprobs:
                shown = orjson.dumps(self._logprobs.chat(update)) if has_logprobs else b"null"
                events += self._starts[update.index] + orjson.dumps(update.text) + b'},"logprobs":' + shown
                events += b',"finish_reason":null}]' + self._tail
            if is_last:
                events += self._event(update.index, {}, update.finish)
            return events
        if update.text or has_logprobs or is_last:
            shown = orjson.dumps(self._logprobs.completion(update)) if has_logprobs else b"null"
            events += self._starts[update.index] + orjson.dumps(update.text) + b',"logprobs":' + shown
            events += b',"finish_reason":' + orjson.dumps(update.finish) + b"}]" + self._tail
        return events

    def usage(self, usage: Usage) -> bytes:
        return b"data: " + self._head + b',"choices":[],"usage":' + orjson.dumps(usage_object(usage)) + b"}\n\n"

    def _event(self, index: int, delta: dict[str, Any], finish: FinishReason | None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
        return b"data: " + self._head + b',"choices":[' + orjson.dumps(choice) + b"]" + self._tail


class WholeAnswer:
    """Collects the updates of an answer that is not streamed."""

    def __init__(self, frame: Frame, choice_count: int, logprobs: Logprobs) -> None:
        self._frame, self._logprobs = frame, logprobs
        self._choices = [ChoiceUpdate(index, "") for index in range(choice_count)]
        self._texts: list[list[str]] = [[] for _ in range(choice_count)]

    def add(self, updates: Sequence[ChoiceUpdate]) -> None:
        for update in updates:
            whole = self._choices[update.index]
            self._texts[update.index].append(update.text)
            whole.offsets += update.offsets
            whole.logprobs += update.logprobs
            whole.text_tokens += update.text_tokens
            whole.finish = update.finish or whole.finish

    def body(self, usage: Usage) -> bytes:
        frame = self._frame
        kind = "chat.completion" if frame.is_chat else "text_completion"
        return orjson.dumps(
            {
                "id": frame.id,
                "object": kind,
                "created": frame.created,
                "model": frame.model,
                "choices": [self._choice(choice) for choice in self._choices],
                "usage": usage_object(usage),
            }
        )

    def _choice(self, choice: ChoiceUpdate) -> dict[str, Any]:
        text = "".join(self._texts[choice.index])
        body: dict[str, Any] = {"index": choice.index, "finish_reason": choice.finish, "logprobs": None}
        if self._frame.is_chat:
            body["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            body["text"] = text
        if self._frame.has_logprobs:
            body["logprobs"] = self._logprobs.chat(choice) if self._frame.is_chat else self._logprobs.completion(choice)
        return body
