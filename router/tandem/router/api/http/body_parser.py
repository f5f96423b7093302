"""Reads requests: a bounded body, JSON, a schema; and turns schemas into asks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from tandem.core.errors import (
    CancelledError,
    DeadlineError,
    InvalidRequestError,
    MediaTypeError,
    RequestTooLargeError,
    UnsupportedParameterError,
)
from tandem.core.sampling import MAX_LOGPROBS
from tandem.router.api.http.entries import check, check_raw
from tandem.router.api.http.errors import from_validation
from tandem.router.api.http.headers import header
from tandem.router.api.http.schemas import (
    ChatRequest,
    CompletionRequest,
    Message,
    RefusalPart,
    RenderingFields,
    SamplingFields,
    TextPart,
    TokenizeRequest,
)
from tandem.router.error_quoting import quoted
from tandem.router.serving.request_parser import ApiRequest, kept_choices
from tandem.router.tokenization.chat_template import THOUGHT_NAMES, Rendering

BODY_S = 60.0
LONG_BODY_BYTES = 256 * 1024
"""Bodies at least this long are parsed in a thread: the event loop has other streams to feed."""
_THREAD = ThreadPoolExecutor(1, "parse")
"""One, as threads share the interpreter: more would parse no faster, and hold tens of megabytes for each body."""
_DRAIN_S = 2.0
_DRAIN_FACTOR = 8
_COMPLETION_MAX_TOKENS = 16
_SAMPLING_FIELDS = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "seed", "ignore_eos", "min_tokens", "prompt_logprobs",
)  # fmt: skip

M = TypeVar("M", bound=BaseModel)
Simplify = Callable[[Mapping[str, Any]], dict[str, Any]]


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """The body, at most `limit_bytes` of it; RequestTooLargeError beyond."""
    declared = header(request, "content-length") or ""
    if declared.isdigit() and int(declared) > limit_bytes:
        if int(declared) <= _DRAIN_FACTOR * limit_bytes and header(request, "expect") is None:
            await _drain(request, limit_bytes)
        raise _too_large(limit_bytes)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_S):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise CancelledError("the client left while it sent the request")
                part: bytes = message.get("body", b"")
                is_whole = not message.get("more_body", False)
                size += len(part)
                if size > limit_bytes:
                    if not is_whole:
                        await _drain(request, limit_bytes)
                    raise _too_large(limit_bytes)
                parts.append(part)
                if is_whole:
                    return part if len(parts) == 1 else b"".join(parts)
    except TimeoutError:
        raise DeadlineError(f"the request body did not arrive within {BODY_S:g} s", todo="send it again") from None


async def read_json(request: Request, limit_bytes: int, model: type[M], simplify: Simplify | None = None) -> M:
    """The body as `model`; InvalidRequestError names the field that is wrong."""
    _check_media_type(request)
    raw = await read_body(request, limit_bytes)
    if len(raw) < LONG_BODY_BYTES:
        return _parsed(raw, limit_bytes, model, simplify)
    return await asyncio.get_running_loop().run_in_executor(_THREAD, _parsed, raw, limit_bytes, model, simplify)


def _parsed(raw: bytes, limit_bytes: int, model: type[M], simplify: Simplify | None) -> M:
    check_raw(raw, limit_bytes)
    try:
        data = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError("the request body is no valid JSON", why=str(error)) from error
    if not isinstance(data, dict):
        raise InvalidRequestError("the request body is no JSON object", todo="send an object")
    check(data, model)
    try:
        return model.model_validate(simplify(data) if simplify else data)
    except ValidationError as error:
        raise from_validation(error, data) from error


def chat_ask(body: ChatRequest) -> ApiRequest:
    if body.top_logprobs is not None:
        if not body.logprobs:
            why = "it needs logprobs: true"
            raise InvalidRequestError("top_logprobs is given without logprobs", why=why, param="top_logprobs")
        if not 0 <= body.top_logprobs <= MAX_LOGPROBS:
            why = f"it must be between 0 and {MAX_LOGPROBS}"
            raise InvalidRequestError(f"top_logprobs is {body.top_logprobs}", why=why, param="top_logprobs")
    sampling = _sampling(body)
    if body.logprobs:
        sampling["logprobs"] = body.top_logprobs or 0
    param = "max_tokens"
    if body.max_completion_tokens is not None:
        param = "max_completion_tokens"
        if body.max_tokens is not None and body.max_tokens != body.max_completion_tokens:
            raise InvalidRequestError(
                "max_tokens and max_completion_tokens differ", todo="give one of them", param=param
            )
        sampling["max_tokens"] = body.max_completion_tokens
    return ApiRequest(
        api="chat",
        model=body.model,
        messages=messages_of(body.messages),
        sampling=sampling,
        stop=_stops(body),
        includes_stop=bool(body.include_stop_str_in_output),
        bad_words=tuple(body.bad_words or ()),
        is_whole=not body.stream,
        max_tokens_param=param,
        logprobs_param="top_logprobs",
        rendering=rendering_of(body),
        cache_salt=body.cache_salt,
        cache_key=body.prompt_cache_key,
    )


def completion_ask(body: CompletionRequest) -> ApiRequest:
    sampling = _sampling(body)
    if body.logprobs is not None:
        sampling["logprobs"] = body.logprobs
    if body.best_of is not None:
        sampling["n"] = body.best_of
    return ApiRequest(
        api="completions",
        model=body.model,
        prompts=_prompts(body.prompt),
        echo=bool(body.echo),
        kept=_kept(body),
        sampling=sampling,
        stop=_stops(body),
        includes_stop=bool(body.include_stop_str_in_output),
        bad_words=tuple(body.bad_words or ()),
        is_whole=not body.stream,
        default_max_tokens=_COMPLETION_MAX_TOKENS,
        cache_salt=body.cache_salt,
        cache_key=body.prompt_cache_key,
    )


def rendering_of(body: RenderingFields) -> Rendering:
    """A prompt ends with the words that ask for an answer, unless it ends inside the last message."""
    continues = bool(body.continue_final_message)
    adds = body.add_generation_prompt
    return Rendering(
        adds_prompt=not continues if adds is None else adds,
        continues_last=continues,
        variables=body.chat_template_kwargs or {},
    )


def _kept(body: CompletionRequest) -> int | None:
    kept = kept_choices(1 if body.n is None else body.n, body.best_of)
    if kept is not None and body.stream:
        why = "which choices are the best is known at the end alone"
        raise InvalidRequestError("best_of cannot be streamed", why=why, todo="leave out stream", param="best_of")
    return kept


def messages_of(messages: list[Message]) -> tuple[dict[str, Any], ...]:
    """Messages as chat templates read them: content is one text, a thought stands under every name that one reads.

    InvalidRequestError for one without content, and for fields of answers in a message that is not the assistant's.
    """
    return tuple(_message_of(message, f"messages[{position}]") for position, message in enumerate(messages))


def _message_of(message: Message, where: str) -> dict[str, Any]:
    thought = message.reasoning_content if message.reasoning is None else message.reasoning
    if message.role != "assistant":
        _check_no_answer(message, where)
    if message.content is None and thought is None and message.refusal is None:
        what, why = f"{where}.content is missing", "only an answer that was reasoning or a refusal alone has none"
        raise InvalidRequestError(what, why=why, todo="give a text or a list of parts", param=f"{where}.content")
    if isinstance(message.content, list):
        content = "\n".join(part.text if isinstance(part, TextPart) else part.refusal for part in message.content)
    else:  # a refusal is all that its answer contains
        content = (message.refusal or "") if message.content is None else message.content
    said: dict[str, Any] = {"role": message.role, "content": content, "name": message.name, "refusal": message.refusal}
    return said | dict.fromkeys(THOUGHT_NAMES, thought) if thought is not None else said


def _check_no_answer(message: Message, where: str) -> None:
    for name in ("reasoning_content", "reasoning", "refusal"):
        if getattr(message, name):
            what, why = f"{where}.{name} is given", f"only answers have it, and the role is {message.role}"
            raise InvalidRequestError(what, why=why, todo="leave it out", param=f"{where}.{name}")
    for number, part in enumerate(message.content if isinstance(message.content, list) else ()):
        if isinstance(part, RefusalPart):
            what, why = (
                f"{where}.content[{number}] is a refusal",
                f"only answers have it, and the role is {message.role}",
            )
            raise InvalidRequestError(what, why=why, todo="send text", param=f"{where}.content[{number}].type")


def check_streaming(body: SamplingFields) -> None:
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidRequestError(
            "prompt_logprobs cannot be streamed", todo="leave out stream", param="prompt_logprobs"
        )
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError("stream_options is given without stream", todo="set stream: true",
                                  param="stream_options")  # fmt: skip
    if body.stream_options is not None and body.stream_options.include_obfuscation:
        raise UnsupportedParameterError(
            "include_obfuscation is not supported yet", todo="leave it out", param="stream_options.include_obfuscation"
        )


def check_tokenizing(body: TokenizeRequest) -> None:
    """Either a text or a chat, and nothing that is for the other."""
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("give either prompt or messages", param="prompt")
    others = ("add_special_tokens",) if body.prompt is None else tuple(RenderingFields.model_fields)
    for name in others:
        if getattr(body, name) is not None:
            given = "messages" if body.prompt is None else "prompt"
            raise InvalidRequestError(f"{name} says nothing about {given}", todo="leave it out", param=name)


def _check_media_type(request: Request) -> None:
    """Accept JSON in UTF-8 and plain, if the client names a type at all. Web pages of another origin have to name it,
    which they cannot unasked."""
    given = header(request, "content-type")
    if given is None:
        given = "" if is_foreign(request) else "application/json"
    kind, _, options = given.lower().partition(";")
    charset = options.partition("charset=")[2].strip(" \"'") or "utf-8"
    if kind.strip() != "application/json" or charset not in ("utf-8", "utf8"):
        raise MediaTypeError(f"the Content-Type is {quoted(given)}", todo="send application/json", param="content-type")
    encoding = header(request, "content-encoding")
    if encoding is not None and encoding.lower() != "identity":
        raise MediaTypeError(
            f"the Content-Encoding is {quoted(encoding)}", todo="send the body as it is", param="content-encoding"
        )


def is_foreign(request: Request) -> bool:
    """True if a browser reports that a page of another origin sent this. Clients that are no browsers do not report."""
    site, origin = header(request, "sec-fetch-site"), header(request, "origin")
    if site is not None:
        return site not in ("same-origin", "none")
    return origin is not None and origin.partition("://")[2] != header(request, "host")


def _sampling(body: SamplingFields) -> dict[str, Any]:
    given = {name: getattr(body, name) for name in _SAMPLING_FIELDS}
    given["max_tokens"] = body.max_tokens
    if body.top_k == -1:  # "off" in other servers
        given["top_k"] = 0
    if body.stop_token_ids is not None:
        given["stop_token_ids"] = tuple(body.stop_token_ids)
    if body.allowed_token_ids is not None:
        given["allowed_token_ids"] = tuple(body.allowed_token_ids)
    if body.logit_bias is not None:
        given["logit_bias"] = _logit_bias(body.logit_bias)
    return {name: value for name, value in given.items() if value is not None}


def _logit_bias(biases: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    for key in biases:
        # No second spelling of a number: "05" beside "5" would leave one of them unheard.
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and str(int(key)) == key):
            raise InvalidRequestError(f"logit_bias has the key {quoted(key)}", why="keys must be token ids",
                                      param="logit_bias")  # fmt: skip
    return tuple((int(key), value) for key, value in biases.items())


def _stops(body: SamplingFields) -> tuple[str, ...]:
    if body.stop is None:
        return ()
    return (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)


def _prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> tuple[str | Sequence[int], ...]:
    if isinstance(prompt, str):
        return (prompt,)
    if not prompt:
        raise InvalidRequestError("the prompt is empty", why="it has no entry", param="prompt")
    if isinstance(prompt[0], int):  # then all are
        return (prompt,)
    return tuple(prompt)


async def _drain(request: Request, limit_bytes: int) -> None:
    """Throw away a body that is a little too long, so that the client gets to read the answer."""
    seen = 0
    try:
        async with asyncio.timeout(_DRAIN_S):
            while seen <= _DRAIN_FACTOR * limit_bytes:
                message = await request.receive()
                seen += len(message.get("body", b""))
                if message["type"] != "http.request" or not message.get("more_body", False):
                    return
    except TimeoutError:
        return


def _too_large(limit_bytes: int) -> RequestTooLargeError:
    return RequestTooLargeError("the request body is too large", why=f"the limit is {limit_bytes} bytes",
                                todo="send less")  # fmt: skip
