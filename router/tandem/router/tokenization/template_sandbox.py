"""Keeps chat templates inside bounds of time and size."""

from __future__ import annotations

import codecs
import functools
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import jinja2
import jinja2.nodes
import jinja2.visitor
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tandem.core.memory import return_free_memory

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
