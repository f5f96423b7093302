"""Renders a model's chat template, in a sandbox, exactly as transformers' `apply_chat_template` does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.visitor

from tandem.core.errors import InvalidRequestError, ModelError
from tandem.router.error_quoting import quoted, shortened
from tandem.router.tokenization.call_arguments import object_of
from tandem.router.tokenization.template_sandbox import BoundedSandbox, LongText, TooLargeError, TooLongError

MAX_VARIABLES_BYTES = 16 * 1024
MAX_VARIABLES_DEPTH = 8
THOUGHT_NAMES = ("reasoning_content", "reasoning", "thinking")
"""Templates' names for a model's reasoning before an answer: Qwen's and DeepSeek's, others, those of gpt-oss."""
_OURS = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_TOOL_NAMES = ("xml_tools", "custom_tools")
"""Other names under which templates read tools: SmolLM3's and those of Llama."""
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


LONG_RENDER_S = 5.0
"""8192 messages are written out in less than a second."""


class UnendingTemplateError(InvalidRequestError):
    """A template took too long, or made too much, of a chat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendering:
    """Options for writing out a chat, beside its messages.

    `adds_prompt`: end with the words that make the model answer. `continues_last`: end inside the last message, so that
    the answer goes on with it. `variables` are the client's own for the template. `tools` are functions as OpenAI
    writes them.
    """

    adds_prompt: bool = True
    continues_last: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] = ()


DEFAULT_RENDERING = Rendering()


@dataclass(frozen=True, slots=True)
class _CallStyle:
    """How a template reads an answer of calls: what stands for content that is missing, and whether arguments are JSON
    texts or objects. `takes_text`: it writes a text, too, where it reads objects. `joins_thoughts`: beside calls it
    reads thoughts or content, and not both."""

    without_content: Mapping[str, Any] = field(default_factory=dict)
    has_text_arguments: bool = False
    takes_text: bool = False
    joins_thoughts: bool = False

    def answer(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """An answer of calls as the template reads it."""
        written = {**message, "tool_calls": [self.written(call) for call in message["tool_calls"]]}
        thoughts = written.get(THOUGHT_NAMES[0])
        if self.joins_thoughts and thoughts and written.get("content"):
            written |= dict.fromkeys(THOUGHT_NAMES, f"{thoughts}\n\n{written.pop('content')}")
        return {**self.without_content, **written}

    def written(self, call: Mapping[str, Any]) -> Mapping[str, Any]:
        """The call as the template reads it. A model may have written what is no object: then that is shown, or else
        the fields that are complete."""
        if self.has_text_arguments:
            return call
        given = call["function"]["arguments"]
        try:
            value = json.loads(given)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            value = given if self.takes_text else object_of(given)
        return {**call, "function": {**call["function"], "arguments": value}}


_CALL_STYLES = tuple(
    _CallStyle(without_content, has_text_arguments)
    for has_text_arguments in (False, True)
    for without_content in ({}, {"content": None}, {"content": ""})
)
"""The first one is that of transformers."""
_CALL = {"id": "123456789", "type": "function", "function": {"name": "probe", "arguments": '{"key": "value"}'}}
_TURN: list[dict[str, Any]] = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": None, "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "123456789", "name": "probe", "content": "Well"},
]
_PROBE = [*_TURN, {"role": "assistant", "content": "Hello"}, *_TURN]
"""Many templates write an earlier answer in another way than the last one."""


class ChatTemplate:
    """A compiled template. `variables` are the tokenizer's special tokens by name (bos_token, eos_token, …).

    `knows_tools`: it writes tools or calls of them, and is not one for texts alone.
    """

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        self._sandbox = environment = BoundedSandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        environment.bound()
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(tree)
            read = jinja2.meta.find_undeclared_variables(tree)
        except jinja2.TemplateError as error:
            raise ModelError("the chat template does not compile", why=str(error), todo="fix it") from error
        self._variables = dict(variables)
        self._settable = read - _OURS - set(variables)
        self._tool_names = [name for name in _TOOL_NAMES if name in read]
        self.knows_tools = "tools" in read or bool(self._tool_names) or "tool_calls" in source
        self._call_style = _CallStyle()
        self._try()
        if "tool_calls" in source:
            self._call_style = self._found_style()
            self._call_style = self._widened_style()
        self.source = source

    def _try(self) -> None:
        """ModelError if the shortest chat takes the template for ever. It may object to it."""
        try:
            self.render([{"role": "user", "content": "Hello"}])
        except UnendingTemplateError as error:
            raise ModelError("the chat template does not end", why=error.why, todo="correct it") from error
        except InvalidRequestError:
            return

    def reads(self, variable: str) -> bool:
        """True if a client may set `variable`."""
        return variable in self._settable

    def _found_style(self) -> _CallStyle:
        """The first style in which the template writes calls, earlier ones and the last: templates differ in what they
        read. Where no style is fit for a whole conversation, the first one for a single call."""
        found = self._call_style
        for chat in (_PROBE, _PROBE[:2]):
            for self._call_style in _CALL_STYLES:
                try:
                    text = self.render(chat, Rendering(adds_prompt=False))
                except InvalidRequestError:
                    continue
                if "probe" in text and "value" in text and "{'key'" not in text:
                    return self._call_style
        return found

    def _widened_style(self) -> _CallStyle:
        """The same style, with what else the template reads of a call."""
        style = self._call_style
        both = {**_TURN[1], **dict.fromkeys(THOUGHT_NAMES, "Hm"), "content": "Well"}
        joined = replace(style, joins_thoughts=True)
        if self._written_by(style, both) is None and self._written_by(joined, both) is not None:
            style = joined
        text = {**_CALL, "function": {"name": "probe", "arguments": "{value"}}
        taking = replace(style, takes_text=True)
        return taking if "{value" in (self._written_by(taking, {**_TURN[1], "tool_calls": [text]}) or "") else style

    def _written_by(self, style: _CallStyle, answer: Mapping[str, Any]) -> str | None:
        """A chat that ends with an answer of this style; None = the template refuses it."""
        self._call_style = style
        try:
            return self.render([_TURN[0], answer], Rendering(adds_prompt=False))
        except InvalidRequestError:
            return None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        rendering: Rendering = DEFAULT_RENDERING,
        *,
        limit_s: float = LONG_RENDER_S,
    ) -> str:
        """The prompt of a chat; InvalidRequestError if the template objects, or does not read a client's variable, its
        kind UnendingTemplateError if it does not end in `limit_s` or makes a text without end."""
        return self.render_long(messages, rendering, limit_s=limit_s).whole()

    def render_long(self, messages: Sequence[Mapping[str, Any]], rendering: Rendering, *, limit_s: float) -> LongText:
        """Render as `render` does, but keep a long prompt in UTF-8 until the caller asks for the whole text."""
        self._check(rendering)
        chat = [self._written(message) for message in messages]
        tools = [dict(tool) for tool in rendering.tools] or None
        if rendering.continues_last:
            chat[-1]["content"] += _TAG
        try:
            with self._sandbox.within(limit_s):
                text = LongText(self._template.generate({
                    **self._variables, **(dict.fromkeys(self._tool_names, tools) if tools else {}),
                    **rendering.variables, "messages": chat, "tools": tools, "documents": None,
                    "add_generation_prompt": rendering.adds_prompt,
                }))  # fmt: skip
        except (TooLongError, TooLargeError, MemoryError) as error:
            why = (
                f"it took longer than {limit_s:g} s" if isinstance(error, TooLongError) else "it makes too much of them"
            )
            raise UnendingTemplateError(
                "the model's chat template does not come to an end with these messages", why=why, param="messages"
            ) from error
        except Exception as error:  # a template is a program: it may fail in any way at what a client sent
            why = shortened(str(error) or type(error).__name__)
            raise InvalidRequestError(
                "the model's chat template does not accept these messages", why=why, param="messages"
            ) from error
        return LongText([_cut(text.whole())]) if rendering.continues_last else text

    def _written(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message as the template reads it, without what it lacks."""
        written = {key: value for key, value in message.items() if value is not None}
        if "tool_calls" not in written:
            return written
        return self._call_style.answer(written)

    def _check(self, rendering: Rendering) -> None:
        for name in rendering.variables:
            if name not in self._settable:
                what = f"chat_template_kwargs has {quoted(name)}"
                why = f"the model's chat template reads {', '.join(sorted(self._settable)) or 'no variable'}"
                raise InvalidRequestError(what, why=why, todo="leave it out", param="chat_template_kwargs")


def check_variables(variables: Mapping[str, Any]) -> None:
    """Raise InvalidRequestError unless `variables`, which came as JSON, are of a size that can be rendered. Of what is
    larger no more is looked at than that takes."""
    if not _is_small(variables):
        raise _too_large(f"more than {MAX_VARIABLES_BYTES}")
    size = len(json.dumps(variables, ensure_ascii=False).encode("utf-8", "surrogatepass"))
    if size > MAX_VARIABLES_BYTES:
        raise _too_large(str(size))


def check_variables_text(text: str) -> None:
    """As `check_variables`, of the JSON before it is parsed."""
    if len(text) > MAX_VARIABLES_BYTES:
        raise _too_large(f"more than {MAX_VARIABLES_BYTES}")


def _is_small(variables: Mapping[str, Any]) -> bool:
    """True if it may have at most MAX_VARIABLES_BYTES: each value takes two bytes at least. InvalidRequestError for
    more than MAX_VARIABLES_DEPTH levels."""
    left, level, here = MAX_VARIABLES_BYTES, 0, [variables]
    while here:
        inside: list[Any] = []
        level += 1
        for one in here:
            names, values = (one, one.values()) if isinstance(one, Mapping) else ((), one)
            left -= 2 * len(one)
            if left < 0:
                return False
            left -= sum(map(len, names)) + sum(len(value) for value in values if isinstance(value, str))
            inside += [value for value in values if isinstance(value, Mapping | list)]
        if inside and level == MAX_VARIABLES_DEPTH:
            why = f"at most {MAX_VARIABLES_DEPTH} levels are allowed"
            raise InvalidRequestError(
                "chat_template_kwargs is nested too deeply", why=why, param="chat_template_kwargs"
            )
        here = inside
    return left >= 0


def _too_large(size: str) -> InvalidRequestError:
    why = f"at most {MAX_VARIABLES_BYTES} are allowed"
    return InvalidRequestError(f"chat_template_kwargs has {size} bytes", why=why, param="chat_template_kwargs")


def _cut(text: str) -> str:
    """Up to where the last message's own words end; as transformers cuts with continue_final_message."""
    at = text.rfind(_TAG.strip())
    if at < 0:
        raise InvalidRequestError(
            "the last message cannot be continued", why="the model's chat template does not write it out",
            param="continue_final_message",
        )  # fmt: skip
    # A template that trims messages took the blank behind the tag; then it trims the message, too.
    return text[:at] if text[at : at + len(_TAG)] == _TAG else text[:at].rstrip()


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; for serving it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
