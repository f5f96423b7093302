"""One streamed response of an OpenAI endpoint: its text as it arrives, its figures, every failure as a TandemError.

If asked by `X-Tandem-Timing`, a Tandem cluster names the workers that computed the response in a comment of the stream.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx

from tandem.clusterctl.endpoint import KEY_TODO, path_of
from tandem.clusterctl.loadgen.client import CHAT, Target
from tandem.core.errors import (
    STATUS,
    AuthError,
    ConfigError,
    ContextLengthError,
    DeadlineError,
    InvalidRequestError,
    NotFoundError,
    PermissionDeniedError,
    RateLimitError,
    TandemError,
    UnavailableError,
    UnknownModelError,
    from_code,
)

_TIMING = ": tandem-timing "
_CONNECT_S = 10.0
_BY_STATUS: Mapping[int, type[TandemError]] = {
    401: AuthError, 403: PermissionDeniedError, 404: NotFoundError, 429: RateLimitError,
}  # fmt: skip
_TODO: Mapping[type[TandemError], str] = {
    AuthError: KEY_TODO,
    PermissionDeniedError: KEY_TODO,
    UnknownModelError: "Name another one with --model",
    NotFoundError: "Check --url and --model",
}
"""Appended to the server's message, which knows no flags."""
Message = dict[str, Any]
"""A message of an OpenAI endpoint."""
OnText = Callable[[str, bool], object]
"""Called with each piece of text as it arrives, and whether it is reasoning text."""


@dataclass(slots=True)
class ReceivedCall:
    """A call of a tool as it arrives; `arguments` is JSON as the model wrote it."""

    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class ChatAnswer:
    """The response received so far; moments are monotonic seconds, 0.0 = not yet."""

    id: str = ""
    model: str = ""
    text: str = ""
    reasoning: str = ""
    calls: dict[int, ReceivedCall] = field(default_factory=dict)
    """By their index."""
    finish_reason: str = ""
    usage: Mapping[str, Any] | None = None
    timing: Mapping[str, Any] | None = None
    """Timings that a Tandem cluster reports."""
    sent_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0
    is_whole: bool = False

    def record(self) -> dict[str, Any]:
        """Return the document `Chat` without the endpoint; unknown values are None."""
        usage, timing, took_s = self.usage, self.timing, self._took_s()
        output = int(usage.get("completion_tokens") or 0) if usage else 0
        return {
            "id": self.id,
            "model": self.model,
            "text": self.text,
            "reasoning": self.reasoning,
            "calls": [asdict(call) for call in self.calls.values()],
            "finish_reason": self.finish_reason,
            "usage": {
                "prompt_tokens": int(usage.get("prompt_tokens") or 0),
                "completion_tokens": output,
                "reasoning_tokens": (usage.get("completion_tokens_details") or {}).get("reasoning_tokens"),
                "cached_tokens": (usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
            } if usage else None,
            "timings": {
                "ttft_s": round(self.first_s - self.sent_s, 6) if self.first_s else None,
                "total_s": round(max(self.last_s - self.sent_s, 0.0), 6),
                "tokens_per_s": round((output - 1) / took_s, 3) if output > 1 and took_s > 0 else None,
            },
            "workers": {
                "prefill": timing.get("prefill") or timing.get("decode"),
                "decode": timing.get("decode"),
            } if timing else None,
            "handoff": timing.get("handoff") if timing else None,
        }  # fmt: skip

    def message(self) -> Message:
        """Return the response as a message of the next request."""
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in self.calls.values()
        ]
        said: Message = {"role": "assistant", "content": self.text or None if calls else self.text}
        return {**said, "tool_calls": calls} if calls else said

    def _took_s(self) -> float:
        """Return seconds from the first token to the last: by the server's clock if it reports them, as chunks may be
        read at once here."""
        first_s, done_s = (self.timing or {}).get("first_token_s"), (self.timing or {}).get("done_s")
        return self.last_s - self.first_s if first_s is None or done_s is None else done_s - first_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """Parameters of every question; None = the server's default. `timeout_s` bounds each silence."""

    model: str
    temperature: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    thinking_tokens: int | None = None
    response_format: Mapping[str, Any] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    timeout_s: float = 600.0

    def body(self, messages: Sequence[Message]) -> dict[str, Any]:
        given = {
            "temperature": self.temperature, "max_tokens": self.max_tokens, "seed": self.seed,
            "thinking_token_budget": self.thinking_tokens, "response_format": self.response_format, "tools": self.tools,
        }  # fmt: skip
        return {
            "model": self.model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **{name: value for name, value in given.items() if value is not None},
        }


@dataclass(slots=True)
class Asker:
    """Client of one endpoint. It opens a connection per question: an idle one may be closed at the other end."""

    url: str
    wish: ChatOptions
    headers: Mapping[str, str]
    target: Target
    _http: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self._http = httpx.Client(
            headers={**self.headers, "X-Tandem-Timing": "1"},
            timeout=httpx.Timeout(self.wish.timeout_s, connect=_CONNECT_S),
            limits=httpx.Limits(max_keepalive_connections=0),
            trust_env=False,
            verify=self.target.tls or True,
        )

    def __enter__(self) -> Asker:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def ask(self, answer: ChatAnswer, messages: Sequence[Message], on_text: OnText) -> None:
        """Write the whole response into `answer`, or the part received before a TandemError.
        Any exception in between, KeyboardInterrupt included, closes the connection, which ends the request."""
        has_begun = False
        answer.sent_s = time.monotonic()
        try:
            with self._http.stream("POST", path_of(self.url, CHAT), json=self.wish.body(messages)) as response:
                if response.status_code != httpx.codes.OK:
                    response.read()
                    raise _refusal(response)
                has_begun = True
                _read(_lines(response.iter_bytes()), answer, on_text)
        except httpx.ReadTimeout as error:
            what = f"{self.url} has sent nothing for {self.wish.timeout_s:g} s"
            raise DeadlineError(what, todo="Ask again, or wait longer with --timeout") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            why = str(error) or type(error).__name__
            raise (_lost(self.url, why) if has_begun else _no_endpoint(self.url, why)) from error
        except UnicodeEncodeError as error:  # the command line was not, or a line that was typed
            raise ConfigError("cannot send the given text", why="it is not UTF-8 text") from error
        if not answer.is_whole and not answer.finish_reason:
            raise _lost(self.url, "the stream has no end")


def _lines(chunks: Iterable[bytes]) -> Iterator[str]:
    """Whole lines. Not those of httpx: it ends lines at characters that a model may write, such as U+2028."""
    rest = b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield line.decode(errors="replace").rstrip("\r")


def _read(lines: Iterable[str], answer: ChatAnswer, on_text: OnText) -> None:
    """Read server-sent events, until the last one. Raises the error that a server sends, UnavailableError for no
    events."""
    for line in lines:
        if line.startswith(_TIMING):
            answer.timing = _json(line.removeprefix(_TIMING))
        elif line.startswith("data:"):
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                answer.is_whole = True
                return
            _take(_json(data), answer, on_text)


def _take(event: Mapping[str, Any], answer: ChatAnswer, on_text: OnText) -> None:
    if isinstance(error := event.get("error"), dict):
        raise _error(str(error.get("code") or ""), 0, str(error.get("message") or "the answer failed"))
    answer.id, answer.model = str(event.get("id") or answer.id), str(event.get("model") or answer.model)
    answer.usage = event.get("usage") or answer.usage
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
        text = delta.get("content") or ""
        calls = delta.get("tool_calls") or ()
        if thought or text or calls:
            answer.last_s = time.monotonic()
            answer.first_s = answer.first_s or answer.last_s
        if thought:
            answer.reasoning += thought
            on_text(thought, True)
        if text:
            answer.text += text
            on_text(text, False)
        for call in calls:
            _take_call(call, answer)
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason


def _take_call(delta: Mapping[str, Any], answer: ChatAnswer) -> None:
    call = answer.calls.setdefault(int(delta.get("index") or 0), ReceivedCall())
    function = delta.get("function") or {}
    call.id = str(delta.get("id") or call.id)
    call.name = str(function.get("name") or call.name)
    call.arguments += str(function.get("arguments") or "")


def _json(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise UnavailableError("the endpoint is not an OpenAI API", why=f"it sent {text[:60]!r}", todo="Check --url")
    return found


def _refusal(response: httpx.Response) -> TandemError:
    """Return the error of a status, in the server's own words if it sent some."""
    status = response.status_code
    try:
        error = response.json()["error"]
        return _error(str(error.get("code") or ""), status, str(error["message"]))
    except (ValueError, KeyError, TypeError, AttributeError):
        return _error("", status, f"{response.url} answers {status} {response.reason_phrase}".rstrip())


def _error(code: str, status: int, message: str) -> TandemError:
    """Return the error for the code if it is one of ours, else for the status."""
    message = " ".join(message.split())
    if code in STATUS:
        kind = type(from_code(code, ""))
    elif "context length" in message:
        kind = ContextLengthError
    else:
        kind = _BY_STATUS.get(status, InvalidRequestError if 400 <= status < 500 else UnavailableError)
    return kind(message, todo=_TODO.get(kind, ""))


def _lost(url: str, why: str) -> TandemError:
    return UnavailableError(f"the connection to {url} was lost in the middle of the answer", why=why, todo="Ask again")


def _no_endpoint(url: str, why: str) -> TandemError:
    return UnavailableError(f"no OpenAI endpoint answers at {url}", why=why, todo="Check --url")
