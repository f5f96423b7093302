"""Collects the parts of an answer that its parser finds, and trims the blanks that only separate them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tandem.router.output_formats.events import CallArguments, CallStart, Content, Event, Reasoning
from tandem.router.output_formats.reader import Reader


class PartCollector:
    """`texts` has the tags that marks stand for; `is_parallel` False = calls after the first one are left out."""

    def __init__(
        self, reader: Reader, texts: Mapping[int, str], new_id: Callable[[], str], *, is_parallel: bool
    ) -> None:
        self._reader, self._texts, self._new_id, self._is_parallel = reader, texts, new_id, is_parallel
        self._events: list[Event] = []
        self._blanks = ""
        """Held back: they are shown if text of the same kind follows."""
        self._is_fresh = False
        """True before the first text behind reasoning."""
        self._is_reasoning = self.has_reasoned = False
        self.calls = 0
        self._has_arguments = False

    def events(self) -> list[Event]:
        """Everything since the last call."""
        events, self._events = self._events, []
        return events

    @property
    def is_reasoning(self) -> bool:
        return self._is_reasoning

    def begin_reasoning(self) -> None:
        """From here on text is reasoning; that of a later part begins on a line of its own."""
        self._is_reasoning, self._blanks = True, "\n" if self.has_reasoned else ""

    def end_reasoning(self) -> None:
        self._is_reasoning, self._blanks, self._is_fresh = False, "", True

    def reasoning(self, text: str) -> None:
        self.has_reasoned |= self._add(Reasoning, text, trims=not self.has_reasoned)

    def content(self, text: str) -> None:
        self._is_fresh &= not self._add(Content, text, trims=self._is_fresh)

    def start(self, name: str, given_id: str = "") -> None:
        """A call begins."""
        self._reader.kept = ""
        self.calls += 1
        self._blanks, self._has_arguments = "", False
        if self._is_parallel or self.calls == 1:
            self._events.append(CallStart(self.calls - 1, given_id or self._new_id(), self._spelled(name)))

    def arguments(self, text: str) -> None:
        """More of the arguments of the call that began last."""
        self._reader.kept = ""
        self._has_arguments |= bool(text)
        if not text or not (self._is_parallel or self.calls == 1):
            return
        index, last = self.calls - 1, self._events[-1] if self._events else None
        text = self._spelled(text)
        if isinstance(last, CallArguments) and last.index == index:
            self._events[-1] = CallArguments(index, last.text + text)
        else:
            self._events.append(CallArguments(index, text))

    def end_arguments(self) -> None:
        """A call without arguments gets an empty object."""
        if not self._has_arguments:
            self.arguments("{}")

    def finish(self) -> None:
        """The answer is over: blanks at its end are part of it, unless they follow a call."""
        if self._blanks and not self.calls:
            self._append(Reasoning if self._is_reasoning else Content, self._blanks)

    def _add(self, kind: type[Content | Reasoning], text: str, *, trims: bool) -> bool:
        """True if something of it is shown now."""
        whole = self._blanks + self._spelled(text)
        if trims:
            whole = whole.lstrip()
        shown = whole.rstrip()
        self._blanks = whole[len(shown) :]
        if shown:
            self._append(kind, shown)
        return bool(shown)

    def _append(self, kind: type[Content | Reasoning], text: str) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, kind):
            self._events[-1] = kind(last.text + text)
        else:
            self._events.append(kind(text))

    def _spelled(self, text: str) -> str:
        """With the tags in place of their marks."""
        return text.translate(self._texts) if self._texts and not text.isascii() else text
