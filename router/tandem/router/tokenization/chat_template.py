"""Renders a model's chat template, in a sandbox, exactly as transformers' `apply_chat_template` does."""

from __future__ import annotations

import codecs
import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.visitor
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tandem.core.errors import InvalidRequestError, ModelError
from tandem.core.memory import return_free_memory
from tandem.router.error_quoting import quoted, shortened

MAX_VARIABLES_BYTES = 16 * 1024
MAX_VARIABLES_DEPTH = 8
THOUGHT_NAMES = ("reasoning_content", "reasoning", "thinking")
"""Templates' names for a model's reasoning before an answer: Qwen's and DeepSeek's, others, those of gpt-oss."""
_OURS = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


LONG_RENDER_S = 5.0
"""8192 messages are written out in less than a second."""


class UnendingTemplateError(InvalidRequestError):
    """A template took too long, or made too much, of a chat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendering:
    """Options for writing out a chat, beside its messages.

    `adds_prompt`: end with the words that make the model answer. `continues_last`: end inside the last message, so that
    the answer goes on with it. `variables` are the client's own for the template.
    """

    adds_prompt: bool = True
    continues_last: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)


DEFAULT_RENDERING = Rendering()


class ChatTemplate:
    """A compiled template. `variables` are the tokenizer's special tokens by name (bos_token, eos_token, …)."""

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
        self._try()

    def _try(self) -> None:
        """ModelError if the shortest chat takes the template for ever. It may object to it."""
        try:
            self.render([{"role": "user", "content": "Hello"}])
        except UnendingTemplateError as error:
            raise ModelError("the chat template does not end", why=error.why, todo="correct it") from error
        except InvalidRequestError:
            return

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
        chat = [{key: value for key, value in message.items() if value is not None} for message in messages]
        if rendering.continues_last:
            chat[-1]["content"] += _TAG
        try:
            with self._sandbox.within(limit_s):
                text = LongText(self._template.generate({
                    **self._variables, **rendering.variables, "messages": chat, "tools": None, "documents": None,
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


MAX_SIZE = 1 << 25
"""Characters of a text, entries of a list: more than the largest chat."""
MAX_NUMBER = 1 << 20
"""Largest number that a filter, a call or an operator that repeats something takes."""
_MAX_BITS = 4096
_LONG_CHARS, _SLICE_CHARS = 1 << 18, 1 << 16
_REPEATING = frozenset({"batch", "center", "expandtabs", "indent", "ljust", "rjust", "slice", "wordwrap", "zfill"})
_WIDTH, _INNER_WIDTH = re.compile(r"\d{7}"), re.compile(r"\{[^{}]*\{")
_CHECKED_OPERATORS = frozenset({"+", "*", "**", "%"})


class TooLongError(Exception):
    """The template did not end in time."""


class TooLargeError(Exception):
    """The template made something of no sensible size."""


class LongText:
    """The text of joined parts, of at most MAX_SIZE characters: TooLargeError beyond.

    Long parts wait as UTF-8, as one character beyond U+FFFF makes each of a Python text take four bytes.
    """

    __slots__ = ("_chars", "_encoded", "_pieces")

    def __init__(self, parts: Iterable[str]) -> None:
        self._pieces: list[str] = []
        """Short parts behind `_encoded`."""
        self._encoded, self._chars = bytearray(), 0
        for part in parts:
            self._chars += len(part)
            _check_length(self._chars)
            if len(part) < _LONG_CHARS:
                self._pieces.append(part)
                continue
            self._encode_pieces()
            for start in range(0, len(part), _SLICE_CHARS):
                self._encoded += _to_utf8(part[start : start + _SLICE_CHARS])

    def __len__(self) -> int:
        return self._chars

    def whole(self) -> str:
        if not self._encoded:
            return "".join(self._pieces)
        self._encode_pieces()
        return_free_memory()  # the parts', beside which the text itself needs a place
        return self._encoded.decode("utf-8", "surrogatepass")

    def utf8(self) -> bytearray:
        """The text in UTF-8, and lone surrogates as it would write them; not to be changed."""
        self._encode_pieces()
        return self._encoded

    def _encode_pieces(self) -> None:
        self._encoded += _to_utf8("".join(self._pieces))
        self._pieces.clear()


def slices(text: str | LongText, size: int) -> Iterator[str]:
    """Yield a text in slices of at most `size` characters, without making all of it."""
    if isinstance(text, str):
        yield from (text[start : start + size] for start in range(0, len(text), size))
        return
    encoded, decoder = text.utf8(), codecs.getincrementaldecoder("utf-8")("surrogatepass")
    yield from (decoder.decode(encoded[start : start + size]) for start in range(0, len(encoded), size))


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """Keeps templates inside: they come with models, from any source, and may neither reach out of here, nor compute or
    grow without end.

    Time is looked at in each turn of a loop and with each call, filter and operator; texts, lists and numbers that
    those make have a size, which is asked beforehand where one step could make a large one. A template ends soon after
    the time that `within` gives has passed. Threads have times of their own; without one a template may take for ever.
    """

    intercepted_binops = _CHECKED_OPERATORS

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._times = threading.local()
        self.turn = lambda: True  # called in each turn of a loop, by way of `call`

    def bound(self) -> None:
        """Bound what is there to be called by now."""
        self.globals.pop("lipsum", None)
        self.filters = {name: self._bounded(name, run) for name, run in self.filters.items()}

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """TooLongError out of a template that this thread runs in the context for longer."""
        self._times.ends_s = time.monotonic() + seconds
        try:
            yield
        finally:
            self._times.ends_s = None

    def parse(self, source: str, name: str | None = None, filename: str | None = None) -> jinja2.nodes.Template:
        """The tree that is to be compiled: what is compiled from a text is not bounded."""
        tree: jinja2.nodes.Template = _Looks().visit(super().parse(source, name, filename))
        return tree

    def call(self, context: Any, callee: Any, /, *arguments: Any, **named: Any) -> Any:
        self._look()
        method = getattr(callee, "__wrapped__", callee)  # the sandbox has a format of its own
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            _check_step(method.__name__, (owner, *arguments), named)
        return _checked(super().call(context, callee, *arguments, **named))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self._look()
        _check_operands(operator, left, right)
        return _checked(super().call_binop(context, operator, left, right))

    def add(self, *parts: Any) -> Any:
        """`+` of three and more, from the left; of texts without those between."""
        if all(type(part) is str for part in parts):
            _check_length(sum(map(len, parts)))
            return "".join(parts)
        return functools.reduce(lambda left, right: self.call_binop(None, "+", left, right), parts)

    def join_texts(self, *parts: Any) -> str:
        """Implement `~`."""
        return self.concat(map(str, parts))

    def _look(self) -> None:
        ends_s = getattr(self._times, "ends_s", None)
        if ends_s is not None and time.monotonic() > ends_s:
            raise TooLongError

    def concat(self, parts: Iterable[str]) -> str:
        """As `"".join`, which it is in jinja2."""
        self._look()
        return LongText(parts).whole()

    def parts(self, *parts: Any) -> tuple[Any, ...]:
        """Parts of a sum that is written out: texts one by one, which spares a copy of long ones."""
        if not all(type(part) is str for part in parts):
            return (self.add(*parts),)
        _check_length(sum(map(len, parts)))
        return parts

    def _bounded(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def bounded(*arguments: Any, **named: Any) -> Any:
            self._look()
            _check_step(name, arguments[1:] if hasattr(run, "jinja_pass_arg") else arguments, named)
            return _checked(run(*arguments, **named))

        return bounded


class _Looks(jinja2.visitor.NodeTransformer):
    """Has each turn of a loop call the environment's `turn`, which looks at the time, texts joined and added by ours,
    and the parts of a sum written out one by one."""

    def visit_Output(self, node: jinja2.nodes.Output) -> list[jinja2.nodes.Node]:  # noqa: N802 - named by jinja2
        return [
            self._parts(one) if isinstance(one, jinja2.nodes.Add) else jinja2.nodes.Output(
                [self.visit(one)], lineno=node.lineno
            ) for one in node.nodes
        ]  # fmt: skip

    def _parts(self, node: jinja2.nodes.Add) -> jinja2.nodes.Node:
        name = f"_tandem_part_{node.lineno}"
        parts = _called("parts", node.lineno, [self.visit(part) for part in _summands(node)])
        body = [jinja2.nodes.Output([jinja2.nodes.Name(name, "load")], lineno=node.lineno)]
        target = jinja2.nodes.Name(name, "store")
        return jinja2.nodes.For(target, parts, body, [], None, False, lineno=node.lineno)

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:  # noqa: N802 - named by jinja2
        self.generic_visit(node)
        look = _called("turn", node.lineno)
        node.body.insert(0, jinja2.nodes.ExprStmt(look, lineno=node.lineno))
        if node.test is not None:
            node.test = jinja2.nodes.And(_called("turn", node.lineno), node.test, lineno=node.lineno)
        return node

    def visit_Add(self, node: jinja2.nodes.Add) -> jinja2.nodes.Node:  # noqa: N802 - named by jinja2
        parts = _summands(node)
        if len(parts) < 3:
            self.generic_visit(node)
            return node
        return _called("add", node.lineno, [self.visit(part) for part in parts])

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:  # noqa: N802 - named by jinja2
        self.generic_visit(node)
        return _called("join_texts", node.lineno, node.nodes)


def _summands(node: jinja2.nodes.Add) -> list[jinja2.nodes.Expr]:
    """Of a sum from the left, in order."""
    left: jinja2.nodes.Expr = node
    parts: list[jinja2.nodes.Expr] = []
    while isinstance(left, jinja2.nodes.Add):
        parts.insert(0, left.right)
        left = left.left
    return [left, *parts]


def _called(name: str, line: int, arguments: Iterable[jinja2.nodes.Expr] = ()) -> jinja2.nodes.Call:
    function = jinja2.nodes.EnvironmentAttribute(name, lineno=line)
    return jinja2.nodes.Call(function, list(arguments), [], None, None, lineno=line)


def _to_utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _checked(made: Any) -> Any:
    if isinstance(made, str | list | tuple) and len(made) > MAX_SIZE:
        raise TooLargeError
    return made


def _check_step(name: str, given: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Of a filter, or a method of a text, with what it is applied to in front."""
    value, *others = given or ("",)
    if name in _REPEATING:
        _check_numbers((*others, *named.values()))
    elif name in ("format", "format_map"):
        _check_format(str(value), (*others, *named.values()))
    elif name == "replace" and len(others) >= 2:
        old, new = map(str, others[:2])
        _check_length((str(value).count(old) if old else len(str(value)) + 1) * len(new))
    elif name == "join":
        parts, glue = (
            (others[0], value) if isinstance(value, str) and others else (value, "".join(map(str, others[:1])))
        )
        if isinstance(parts, list | tuple):
            _check_length(sum(len(part) for part in parts if isinstance(part, str)) + len(parts) * len(glue))


def _check_length(length: int) -> None:
    if length > MAX_SIZE:
        raise TooLargeError


def _check_numbers(given: Iterable[Any]) -> None:
    for one in given:
        if isinstance(one, int) and abs(one) > MAX_NUMBER:
            raise TooLargeError


def _check_format(pattern: str, given: Iterable[Any]) -> None:
    """Of `%` and `format`: widths, in the pattern or among what is given."""
    if "*" in pattern or _INNER_WIDTH.search(pattern):
        _check_numbers(given)
    if _WIDTH.search(pattern):
        raise TooLargeError


def _check_operands(operator: str, left: Any, right: Any) -> None:
    """Of what could be large before it is there."""
    if operator == "*":
        for one, times in ((left, right), (right, left)):
            if isinstance(one, str | list | tuple) and isinstance(times, int):
                _check_length(len(one) * times)
        if isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() + right.bit_length())
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * max(1, right))
    elif operator == "%" and isinstance(left, str):
        _check_format(left, right if isinstance(right, tuple) else (right,))


def _check_bits(bits: int) -> None:
    if bits > _MAX_BITS:
        raise TooLargeError
