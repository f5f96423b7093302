"""Answers that are given when they are complete: their choices put together, and the best of them picked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tandem.router.serving.choices import ChoiceUpdate


class WholeChoices:
    """Collects the updates of all choices of an answer."""

    def __init__(self, count: int) -> None:
        self._choices = [ChoiceUpdate(index, "") for index in range(count)]
        self._texts: list[list[str]] = [[] for _ in range(count)]

    def add(self, updates: Iterable[ChoiceUpdate]) -> None:
        for update in updates:
            whole = self._choices[update.index]
            self._texts[update.index].append(update.text)
            whole.echo = update.echo or whole.echo
            if update.prompt_logprobs is not None:
                whole.prompt_logprobs = update.prompt_logprobs
            whole.tokens += update.tokens
            whole.offsets += update.offsets
            whole.logprobs += update.logprobs
            whole.text_tokens += update.text_tokens
            whole.finish = update.finish or whole.finish

    def choices(self, prompt_count: int, kept: int | None = None) -> list[ChoiceUpdate]:
        """All choices, numbered prompt by prompt; with `kept` the best so many of each prompt, the best first.

        The best has the highest mean log-probability of its tokens; of equal ones the first.
        """
        for whole, texts in zip(self._choices, self._texts, strict=True):
            whole.text = "".join(texts)
        size = len(self._choices) // prompt_count
        if kept is None or kept == size:
            return self._choices
        best: list[ChoiceUpdate] = []
        for first in range(0, len(self._choices), size):
            best += sorted(self._choices[first : first + size], key=_badness)[:kept]
        for index, choice in enumerate(best):
            choice.index = index
        return best


def _badness(choice: ChoiceUpdate) -> float:
    return -mean_logprob([logprob.logprob for logprob in choice.logprobs])


def mean_logprob(logprobs: Sequence[float]) -> float:
    """Per token; an answer without any is as likely as can be."""
    return sum(logprobs) / len(logprobs) if logprobs else 0.0
