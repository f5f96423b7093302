"""Counts the tokens of a choice's thoughts, and forces their end where the budget is spent.

It is a function of the budget and the output tokens, so a choice that moves to another worker goes on as it would have.
"""

from __future__ import annotations

from collections import deque

from tandem.core.thought_budget import ThoughtBudget


class ThoughtCounter:
    """The place of one choice in its thoughts. Belongs to the step loop's thread.

    `is_over`: no thought can come any more, and nothing is forced.
    """

    __slots__ = ("_begin", "_budget", "_closing", "_due", "_is_inside", "_left", "_recent", "is_over")

    def __init__(self, budget: ThoughtBudget) -> None:
        self._budget, self._left, self._closing = budget, budget.tokens, budget.closing
        self._begin = deque(budget.begin)
        self._recent: deque[int] = deque(maxlen=len(budget.begin))
        self._due: deque[int] = deque()
        self._is_inside = budget.is_begun
        self.is_over = False
        self._close_if_spent()

    @property
    def forced(self) -> int | None:
        """The token that has to come next; None = the model chooses."""
        return self._due[0] if self._due else None

    def add(self, token: int) -> None:
        """Take in the next output token, unless they are over."""
        if self._due:
            self._due.popleft()
            if not self._due:
                self._closing = self._budget.last_closing
                self._leave()
            return
        self._recent.append(token)
        if not self._is_inside:
            self._is_inside = self._recent == self._begin
        elif token in self._budget.ends:
            self._leave()
        else:
            self._left -= 1
        self._close_if_spent()

    def _leave(self) -> None:
        self._is_inside = False
        self.is_over = not self._budget.last_closing

    def _close_if_spent(self) -> None:
        if self._is_inside and self._left <= 0:
            self._due.extend(self._closing)
