"""Base of the models of requests, and the rule for their lists."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, FailFast


class _FirstError(FailFast):
    """As pydantic's, but it may stand in a union."""

    def __hash__(self) -> int:
        return hash(self.fail_fast)


FIRST_ERROR = _FirstError()
"""Lists are not looked at behind their first wrong element."""


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
