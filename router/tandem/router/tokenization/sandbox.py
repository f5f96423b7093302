"""Sandbox of chat templates: they come with models, from any source, and may neither reach out of here, nor compute or
grow without end.

jinja2's sandbox keeps them inside. Time is looked at in each turn of a loop and with each call, filter and operator;
texts, lists and numbers that those make have a size, which is asked beforehand where one step could make a large one.
"""

from __future__ import annotations

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


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """A sandbox in which a template ends soon after the time that `within` gives has passed. Threads have times of
    their own; without one a template may take for ever."""

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
        """As `"".join`, which it is in jinja2. Long parts wait as UTF-8: one character beyond U+FFFF makes each of a
        Python text take four bytes."""
        self._look()
        pieces: list[str] = []
        encoded, size = bytearray(), 0
        for part in parts:
            size += len(part)
            if size > MAX_SIZE:
                raise TooLargeError
            if len(part) < _LONG_CHARS:
                pieces.append(part)
                continue
            encoded += _to_utf8("".join(pieces))
            pieces.clear()
            for start in range(0, len(part), _SLICE_CHARS):
                encoded += _to_utf8(part[start : start + _SLICE_CHARS])
        rest = "".join(pieces)
        if not encoded:
            return rest
        encoded += _to_utf8(rest)
        return_free_memory()  # the parts', beside which the text itself needs a place
        return encoded.decode("utf-8", "surrogatepass")

    def _bounded(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def bounded(*arguments: Any, **named: Any) -> Any:
            self._look()
            _check_step(name, arguments[1:] if hasattr(run, "jinja_pass_arg") else arguments, named)
            return _checked(run(*arguments, **named))

        return bounded


class _Looks(jinja2.visitor.NodeTransformer):
    """Has each turn of a loop call the environment's `turn`, which looks at the time, and texts joined and added by
    ours."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:  # noqa: N802 - named by jinja2
        self.generic_visit(node)
        look = _called("turn", node.lineno)
        node.body.insert(0, jinja2.nodes.ExprStmt(look, lineno=node.lineno))
        if node.test is not None:
            node.test = jinja2.nodes.And(_called("turn", node.lineno), node.test, lineno=node.lineno)
        return node

    def visit_Add(self, node: jinja2.nodes.Add) -> jinja2.nodes.Node:  # noqa: N802 - named by jinja2
        left: jinja2.nodes.Expr = node
        parts: list[jinja2.nodes.Expr] = []
        while isinstance(left, jinja2.nodes.Add):
            parts.insert(0, left.right)
            left = left.left
        if len(parts) < 2:
            self.generic_visit(node)
            return node
        return _called("add", node.lineno, [self.visit(part) for part in (left, *parts)])

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:  # noqa: N802 - named by jinja2
        self.generic_visit(node)
        return _called("join_texts", node.lineno, node.nodes)


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
