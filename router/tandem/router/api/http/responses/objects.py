"""The response object, as OpenAI's clients read it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tandem.core.errors import TandemError
from tandem.core.state_enums import FinishReason
from tandem.router.api.http.responses.schemas import ReasoningOptions, ResponseRequest, TextOptions
from tandem.router.api.http.strict_models import Strict
from tandem.router.serving.response_stream import TokenUsage

Item = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A response that is being written: everything that is known before its first token."""

    id: str
    created_s: int
    request: ResponseRequest

    def begun(self) -> dict[str, Any]:
        """The object while it has no output."""
        return self._object("in_progress", [])

    def ended(
        self, output: Sequence[Item], finish: FinishReason | None, usage: TokenUsage, completed_s: int, *, is_kept: bool
    ) -> dict[str, Any]:
        """The finished object; an answer that ran into its length limit is "incomplete"."""
        is_whole = finish is not FinishReason.LENGTH
        body = self._object("completed" if is_whole else "incomplete", output)
        body["usage"] = usage_object(usage)
        body["store"] = is_kept
        if is_whole:
            body["completed_at"] = completed_s
        else:
            body["incomplete_details"] = {"reason": "max_output_tokens"}
        return body

    def failed(self, error: TandemError) -> dict[str, Any]:
        """The object of a response that broke off; it is not stored."""
        body = self._object("failed", [])
        body["store"] = False
        body["error"] = {"code": "server_error", "message": error.message}
        return body

    def _object(self, status: str, output: Sequence[Item]) -> dict[str, Any]:
        asked = self.request
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created_s,
            "status": status,
            "background": False,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "model": asked.model,
            "output": output,
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": asked.previous_response_id,
            "prompt_cache_key": asked.prompt_cache_key,
            "reasoning": (asked.reasoning or ReasoningOptions()).model_dump(),
            "safety_identifier": asked.safety_identifier,
            "service_tier": "default",
            "store": asked.store is not False,
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "text": {"format": _format_object(asked.text)},
            "tool_choice": _shown(asked.tool_choice or "auto"),
            "tools": [_shown(tool) for tool in asked.tools or ()],
            "top_logprobs": 0,
            "top_p": 1.0 if asked.top_p is None else asked.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": asked.user,
        }


def _shown(given: Strict | str) -> dict[str, Any] | str:
    return given if isinstance(given, str) else given.model_dump(exclude_none=True)


def _format_object(text: TextOptions | None) -> dict[str, Any]:
    """The format of the answer, as it was asked for."""
    if text is None or text.format is None:
        return {"type": "text"}
    return text.format.model_dump(by_alias=True, exclude_none=True)


def new_id(prefix: str) -> str:
    """A fresh id such as `resp_6f0c…`."""
    return f"{prefix}_{secrets.token_hex(16)}"


def usage_object(usage: TokenUsage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
