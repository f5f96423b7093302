"""Shows an answer as it arrives, and the line under it: speed, workers, cached tokens, cost of the hand-off."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.text import Text

from tandem.clusterctl.chat.client import Asker, ChatAnswer, Message, ReceivedCall
from tandem.clusterctl.output import Record, ms

_UNSHOWN = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
"""Characters that a terminal obeys: a model may write any."""


def say_answer(asker: Asker, answer: ChatAnswer, messages: list[Message], *, hides_thoughts: bool = False) -> None:
    """Print the text as it arrives, then the calls; reasoning only on a terminal, dim. Ends the last line even if an
    exception is raised."""
    teller = _Teller(hides_thoughts)
    try:
        asker.ask(answer, messages, teller.tell)
    finally:
        teller.end()
    for call in answer.calls.values():
        teller.tell(f"{text_of(call)}\n", False)


def text_of(call: ReceivedCall) -> str:
    """Format a call in a line, such as "get_weather {"city": "Rome"}"."""
    return f"→ {call.name} {' '.join(call.arguments.split())}"


def say_figures(answer: ChatAnswer) -> None:
    """Print the line on the standard error, dim on a terminal."""
    if line := line_of(answer.record()):
        sys.stdout.flush()
        Console(stderr=True).print(Text(line, style="dim"), soft_wrap=True)


class _Teller:
    """Writes pieces of text to the standard output."""

    def __init__(self, hides_thoughts: bool) -> None:
        self._console = Console() if sys.stdout.isatty() else None
        self._hides_thoughts = hides_thoughts
        self._is_thinking = False
        self._last = "\n"

    def tell(self, text: str, is_thought: bool) -> None:
        if is_thought and (self._hides_thoughts or self._console is None):
            return
        if self._console is None:
            self._write(text)
            return
        if self._is_thinking and not is_thought:
            self._write("\n\n")
        self._is_thinking = is_thought
        text = text.translate(_UNSHOWN)
        if is_thought:
            self._console.print(Text(text, style="dim"), end="", soft_wrap=True)
            self._last = text[-1:]
        else:
            self._write(text)

    def end(self) -> None:
        if self._last != "\n":
            self._write("\n")

    def _write(self, text: str) -> None:
        self._last = text[-1:] or self._last
        sys.stdout.write(text)
        sys.stdout.flush()


def line_of(found: Record) -> str:
    """Format the known values of a document `Chat`; "" if none is known."""
    timings, usage, workers, handoff = found["timings"], found["usage"], found["workers"], found["handoff"]
    parts = []
    if timings["ttft_s"] is not None:
        parts.append(f"TTFT {ms(timings['ttft_s'])}")
    if timings["tokens_per_s"] is not None:
        parts.append(f"{timings['tokens_per_s']:.1f} tokens/s")
    if workers is not None:
        is_one = workers["prefill"] == workers["decode"]
        parts.append(f"on {workers['decode']}" if is_one else f"{workers['prefill']} → {workers['decode']}")
    if handoff is not None:
        parts.append(f"hand-off {ms(handoff['overhead_s'])}")
    if usage is not None:
        parts.append(f"{usage['prompt_tokens']} in, {usage['completion_tokens']} out")
        if usage["reasoning_tokens"]:
            parts[-1] += f" ({usage['reasoning_tokens']} of reasoning)"
        if usage["cached_tokens"] is not None:
            parts[-1] += f", {usage['cached_tokens']} cached"
    if found["finish_reason"] not in ("", "stop"):
        parts.append(f"ended by {found['finish_reason']}")
    return " · ".join(parts)
