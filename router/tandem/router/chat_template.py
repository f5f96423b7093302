"""Renders a model's chat template, in a sandbox, exactly as transformers' `apply_chat_template` does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tandem.core.errors import InvalidRequestError, ModelError


class ChatTemplate:
    """A compiled template. `variables` are the tokenizer's special tokens by name (bos_token, eos_token, …)."""

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError("the chat template does not compile", why=str(error), todo="fix it") from error
        self._variables = dict(variables)

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt of a chat, up to where the assistant's answer begins; InvalidRequestError if it objects."""
        chat = [{key: value for key, value in message.items() if value is not None} for message in messages]
        try:
            return self._template.render(messages=chat, tools=None, documents=None, add_generation_prompt=True,
                                         **self._variables)  # fmt: skip
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise InvalidRequestError(
                "the model's chat template does not accept these messages", why=str(error), param="messages"
            ) from error


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
