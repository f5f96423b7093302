"""Requests of clients as pydantic models, and what the router makes of them.

Types are strict, unknown fields forbidden; every list and map has a bound of entries, every text but those that a model
reads one of characters.

Parameters that OpenAI or other servers know and this one does not support yet are distinguished from unknown ones:
their neutral values are accepted, everything else is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, ValidatorFunctionWrapHandler, WrapValidator

from tandem.core.errors import InvalidRequestError, UnsupportedParameterError
from tandem.core.sampling import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_TOKEN_IDS
from tandem.router.api.http.output_fields import CONSTRAINTS, OutputFields, output_grammar_of
from tandem.router.api.http.speculation_fields import DRAFTING, SpeculationFields, drafting_of
from tandem.router.api.http.strict_models import FIRST_ERROR, Strict
from tandem.router.api.http.tool_fields import (
    REASONING,
    ToolCalls,
    ToolFields,
    Tools,
    calls_of,
    chat_tool_use,
    named_results,
    reasoning_of,
    refuse_kinds,
    tools_of,
)
from tandem.router.dispatch.inflight_request import GenerationRequest
from tandem.router.error_quoting import quoted
from tandem.router.serving.request_parser import MAX_MESSAGES, MAX_PROMPTS, MAX_STOPS, MAX_WORDS, kept_choices
from tandem.router.tokenization.chat_template import THOUGHT_NAMES, Rendering

MAX_PARTS = 1024
"""Of one message."""
MAX_IDS = 1 << 22
"""Of one list: more than a body of the usual size holds; which are tokens is asked later."""
MAX_VARIABLES = 1024
_NOTHING: tuple[Any, ...] = (None, [], {}, "", False)
_COMPLETION_MAX_TOKENS = 16
_SAMPLING_FIELDS = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "seed", "ignore_eos", "min_tokens", "prompt_logprobs",
)  # fmt: skip

# Values that ask for nothing; any other value is refused.
_NEUTRAL_ANYWHERE: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (None, True),
    "beam_width": _NOTHING,
    "detokenize": (None, True),
    "ebnf": _NOTHING,
    "grammar": _NOTHING,
    "json_schema": _NOTHING,
    "kv_transfer_params": _NOTHING,
    "length_penalty": (None, 1),
    "lora_path": _NOTHING,
    "moderation": _NOTHING,
    "prompt_cache_retention": (None, "in_memory", "in-memory"),
    "prompt_embeds": _NOTHING,
    "regex": _NOTHING,
    "skip_special_tokens": (None, True),
    "spaces_between_special_tokens": (None, True),
    "store": _NOTHING,
    "truncate_prompt_tokens": _NOTHING,
    "use_beam_search": _NOTHING,
    "vllm_xargs": _NOTHING,
}
NEUTRAL_CHAT: dict[str, tuple[Any, ...]] = {
    **_NEUTRAL_ANYWHERE,
    "best_of": (None, 1),
    "echo": _NOTHING,
    "audio": _NOTHING,
    "chat_template": _NOTHING,
    "documents": _NOTHING,
    "function_call": (None, "none", "auto"),
    "functions": _NOTHING,
    "modalities": (None, ["text"]),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
}
NEUTRAL_COMPLETION: dict[str, tuple[Any, ...]] = {**_NEUTRAL_ANYWHERE, "suffix": _NOTHING}


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


Int = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Short = Annotated[str, Field(max_length=64)]
Name = Annotated[str, Field(max_length=512)]
CacheControl = Annotated[dict[Short, bool | Int | Short | None], Field(max_length=8)]
"""A breakpoint of Anthropic's cache: accepted and not read, as every prefix is cached here."""
Ids = Annotated[list[Int], Field(max_length=MAX_IDS), FIRST_ERROR]
Metadata = Annotated[dict[Short, Annotated[str, Field(max_length=512)]], Field(max_length=16)]


def _token_ids(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """A list of numbers, or of such lists, is taken as it is: pydantic needs a millisecond for it. Which are tokens is
    asked later. Of numbers and something else pydantic sees no more than shows that: it would walk them several
    times."""
    if type(value) is not list or not value or type(value[0]) not in (int, list):
        return validate(value)
    rows = value if type(value[0]) is list else [value]
    if all(type(row) is list and _is_plain(row) for row in rows):
        return value
    short = [_shown(row) if type(row) is list else row for row in rows]
    return validate(short if rows is value else short[0])


def _plain_ids(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """As `_token_ids`, of one list."""
    return value if type(value) is list and _is_plain(value) else validate(value)


def _is_plain(row: list[Any]) -> bool:
    return set(map(type, row)) <= {int}


def _shown(row: list[Any]) -> list[Any]:
    return row[:1] + [one for one in row[1:] if type(one) is not int][:1]


class SamplingFields(OutputFields, SpeculationFields):
    """Fields that both APIs share."""

    model: Name
    temperature: float | None = None
    top_p: float | None = None
    n: Int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS), FIRST_ERROR] | None = None
    max_tokens: Int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_LOGIT_BIAS)] | None = None
    seed: Int | None = None
    top_k: Int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: Annotated[list[Int], Field(max_length=MAX_STOP_TOKEN_IDS), FIRST_ERROR] | None = None
    ignore_eos: bool | None = None
    min_tokens: Int | None = None
    bad_words: Annotated[list[str], Field(max_length=MAX_WORDS), FIRST_ERROR] | None = None
    allowed_token_ids: Annotated[list[Int], Field(min_length=1, max_length=MAX_IDS), FIRST_ERROR] | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: Int | None = None
    return_token_ids: bool | None = None
    priority: Int | None = None
    timeout: float | None = None
    cache_salt: str | None = None
    prompt_cache_key: str | None = None
    # Information for the operator of a server that keeps it; this one keeps nothing.
    user: Name | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: Short | None = None


class TextPart(Strict):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None


class RefusalPart(Strict):
    """The reason why an earlier answer refused: its text."""

    type: Literal["refusal"]
    refusal: str


def part_kind(value: Any) -> str:
    """The tag of a part of a message: TEXT's or REFUSAL's."""
    return REFUSAL.tag if isinstance(value, Mapping) and value.get("type") == "refusal" else TEXT.tag


TEXT, REFUSAL = Tag("a text"), Tag("a refusal")
Part = Annotated[Annotated[TextPart, TEXT] | Annotated[RefusalPart, REFUSAL], Discriminator(part_kind)]


class Message(Strict):
    """Answers come back as servers gave them: with the model's reasoning, calls, or the reason of a refusal; then
    content may be null (`messages_of` asks for it otherwise). `parsed`: what helpers of the `openai` package made of
    the content; nothing is done with it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[Part], Field(min_length=1, max_length=MAX_PARTS), FIRST_ERROR] | None = None
    name: Name | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    parsed: Any = None
    tool_calls: ToolCalls | None = None
    function_call: None = None
    audio: None = None
    annotations: Annotated[list[Any], Field(max_length=MAX_PARTS), FIRST_ERROR] | None = None
    tool_call_id: Name | None = None
    reasoning_details: Annotated[list[Any], Field(max_length=0)] | None = None
    thinking_blocks: Annotated[list[Any], Field(max_length=0)] | None = None


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES), FIRST_ERROR]


class RenderingFields(Strict):
    """Fields that define how messages become a prompt."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=MAX_VARIABLES)] | None = None
    tools: Tools | None = None


class ChatRequest(SamplingFields, RenderingFields, ToolFields):
    messages: Messages
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None


class CompletionRequest(SamplingFields):
    prompt: Annotated[
        str
        | Annotated[list[str], Field(max_length=MAX_PROMPTS), FIRST_ERROR]
        | Ids
        | Annotated[list[Ids], Field(max_length=MAX_PROMPTS), FIRST_ERROR],
        WrapValidator(_token_ids),
    ]
    logprobs: Int | None = None
    best_of: Int | None = None
    echo: bool | None = None


class TokenizeRequest(RenderingFields):
    model: Name | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None


class DetokenizeRequest(Strict):
    model: Name | None = None
    tokens: Annotated[list[Int], Field(max_length=MAX_IDS), FIRST_ERROR, WrapValidator(_plain_ids)]


def without_neutral_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a chat request without parameters that ask for nothing; UnsupportedParameterError for the others."""
    _refuse_parts(body)
    if "tools" in body or "tool_choice" in body:
        refuse_kinds(body)
    return _without_neutral(body, NEUTRAL_CHAT)


def without_neutral_completion(body: Mapping[str, Any]) -> dict[str, Any]:
    return _without_neutral(body, NEUTRAL_COMPLETION)


def _without_neutral(body: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    kept = {}
    for name, value in body.items():
        if name not in neutral:
            kept[name] = value
        elif not any(type(value) is type(one) and value == one for one in neutral[name]):
            raise UnsupportedParameterError(f"{name} is not supported yet", todo="leave it out", param=name)
    return kept


def _refuse_parts(body: Mapping[str, Any]) -> None:
    """Name message parts and roles that OpenAI knows, rather than call them wrong types."""
    messages = body.get("messages")
    for position, message in enumerate(messages if isinstance(messages, list) else ()):
        if not isinstance(message, dict):
            continue
        where = f"messages[{position}]"
        if message.get("role") == "function":
            raise _unsupported(f"{where}.role", "the role 'function'")
        for name in ("function_call", "audio", "reasoning_details", "thinking_blocks"):
            if message.get(name):
                raise _unsupported(f"{where}.{name}", name)
        content = message.get("content")
        for number, part in enumerate(content if isinstance(content, list) else ()):
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind != "text" and (kind != "refusal" or message.get("role") != "assistant"):
                raise _unsupported(f"{where}.content[{number}].type", f"content of type {quoted(kind)}")


def _unsupported(param: str, what: str) -> UnsupportedParameterError:
    return UnsupportedParameterError(f"{what} is not supported yet", todo="send text only", param=param)


def chat_ask(body: ChatRequest) -> GenerationRequest:
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
    rendering = rendering_of(body)
    tools = None
    if rendering.tools or body.tool_choice is not None:
        tools = chat_tool_use(body, rendering.tools, body.tools or ())
    return GenerationRequest(
        api="chat",
        served_model=body.model,
        messages=messages_of(body.messages),
        options=sampling,
        stop=_stops(body),
        includes_stop=bool(body.include_stop_str_in_output),
        bad_words=tuple(body.bad_words or ()),
        output_grammar=output_grammar_of(body) if body.model_fields_set & CONSTRAINTS else None,
        is_whole=not body.stream,
        max_tokens_param=param,
        logprobs_param="top_logprobs",
        rendering=rendering if tools else replace(rendering, tools=()),
        tools=tools,
        **(reasoning_of(body) if body.model_fields_set & REASONING else {}),
        cache_salt=body.cache_salt,
        cache_key=body.prompt_cache_key,
    )


def completion_ask(body: CompletionRequest) -> GenerationRequest:
    sampling = _sampling(body)
    if body.logprobs is not None:
        sampling["logprobs"] = body.logprobs
    if body.best_of is not None:
        sampling["n"] = body.best_of
    return GenerationRequest(
        api="completions",
        served_model=body.model,
        prompts=_prompts(body.prompt),
        echoes=bool(body.echo),
        kept=_kept(body),
        options=sampling,
        stop=_stops(body),
        includes_stop=bool(body.include_stop_str_in_output),
        bad_words=tuple(body.bad_words or ()),
        output_grammar=output_grammar_of(body) if body.model_fields_set & CONSTRAINTS else None,
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
        tools=tools_of(body.tools) if body.tools else (),
    )


def _kept(body: CompletionRequest) -> int | None:
    kept = kept_choices(1 if body.n is None else body.n, body.best_of)
    if kept is not None and body.stream:
        why = "the best choices are known only at the end"
        raise InvalidRequestError("best_of cannot be streamed", why=why, todo="leave out stream", param="best_of")
    return kept


def messages_of(messages: list[Message]) -> tuple[dict[str, Any], ...]:
    """Messages as chat templates read them: content is one text, a thought stands under every name that one reads.

    InvalidRequestError for one without content, and for fields of answers in a message that is not the assistant's.
    """
    read = tuple(_message_of(message, f"messages[{position}]") for position, message in enumerate(messages))
    return named_results(read) if any(message.role == "tool" for message in messages) else read


def _message_of(message: Message, where: str) -> dict[str, Any]:
    thought = message.reasoning_content if message.reasoning is None else message.reasoning
    if message.role != "assistant":
        _check_no_answer(message, where)
    if (message.tool_call_id is None) == (message.role == "tool"):
        what, why = f"{where}.tool_call_id is missing", "a result names its call"
        if message.role != "tool":
            what, why = f"{where}.tool_call_id is given", f"only results have it, and the role is {message.role}"
        raise InvalidRequestError(what, why=why, param=f"{where}.tool_call_id")
    if message.content is None and thought is None and message.refusal is None and not message.tool_calls:
        what, why = (
            f"{where}.content is missing",
            "only an answer of reasoning, calls or a refusal has none",
        )
        raise InvalidRequestError(what, why=why, todo="give a text or a list of parts", param=f"{where}.content")
    if isinstance(message.content, list):
        content = "\n".join(part.text if isinstance(part, TextPart) else part.refusal for part in message.content)
    else:  # a refusal is all that its answer contains
        content = (message.refusal or "") if message.content is None else message.content
    said: dict[str, Any] = {"role": message.role, "content": content, "name": message.name, "refusal": message.refusal}
    if message.tool_calls:
        said["tool_calls"] = calls_of(message.tool_calls)
        said["content"] = None if message.content is None else content
    if message.role == "tool":
        said["tool_call_id"] = message.tool_call_id
    return said | dict.fromkeys(THOUGHT_NAMES, thought) if thought is not None else said


def _check_no_answer(message: Message, where: str) -> None:
    for name in ("reasoning_content", "reasoning", "refusal", "tool_calls"):
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
            raise InvalidRequestError(f"{name} does not apply to {given}", todo="leave it out", param=name)


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
    drafting = drafting_of(body) if body.model_fields_set & DRAFTING else {}
    return {name: value for name, value in given.items() if value is not None} | drafting


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
