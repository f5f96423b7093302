"""The bound on how much a model thinks before it answers, as it travels to workers: in tokens, never as text."""

from __future__ import annotations

from dataclasses import dataclass

MAX_TAG_TOKENS = 64
"""Of each sequence of a budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThoughtBudget:
    """Behind `tokens` tokens of thought those of `closing` come next, whatever the model would write.

    The sequence `begin` begins a thought, each token of `ends` ends it; neither counts. `is_begun`: the prompt ends
    inside a thought. An answer has one, unless there is a `last_closing`: then further ones share the budget, and
    where one begins with nothing left of it, that is forced in place of a second `closing`.
    """

    tokens: int
    begin: tuple[int, ...]
    ends: tuple[int, ...]
    closing: tuple[int, ...]
    last_closing: tuple[int, ...] = ()
    is_begun: bool = False
