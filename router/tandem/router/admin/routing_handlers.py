"""Operators' requests about routing: the policy in force, a change of it, and an explanation of where a prompt would
go."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tandem.core.admin_schema import RoutedWorker, copied
from tandem.core.config import PolicyName
from tandem.core.errors import InvalidRequestError
from tandem.router.api.http.errors import from_validation
from tandem.router.api.http.output_fields import OutputFields, output_grammar_of
from tandem.router.api.http.schemas import Message, messages_of
from tandem.router.dispatch.dispatcher import Dispatcher
from tandem.router.dispatch.inflight_request import GenerationRequest
from tandem.router.dispatch.retry_policy import RetryPolicy
from tandem.router.routing.plan import Candidate, decision
from tandem.router.serving.request_parser import RequestParser

_DIGITS = 6
M = TypeVar("M", bound=BaseModel)


class ExplainRequest(OutputFields):
    """Exactly one of `prompt` (text or token ids) and `messages`. `model` None = the first that is served."""

    model: str | None = None
    prompt: str | list[int] | None = None
    messages: list[Message] | None = None
    max_tokens: int = Field(default=16, ge=1)
    n: int = Field(default=1, ge=1)


class PolicyRequest(BaseModel):
    """The name of a policy."""

    model_config = ConfigDict(extra="forbid", strict=True)

    policy: str


class RoutingHandlers:
    """Answers in plain values, ready to be JSON. Belongs to the event loop."""

    def __init__(self, reader: RequestParser, dispatcher: Dispatcher, retry_policy: RetryPolicy) -> None:
        self._reader, self._dispatcher, self._retry_policy = reader, dispatcher, retry_policy

    def policy(self) -> dict[str, Any]:
        """The policy in force, and all that there are."""
        return {"policy": self._retry_policy.policy.name, "policies": list(PolicyName)}

    def select(self, body: object) -> dict[str, Any]:
        """Change the policy; requests in flight keep their plans. InvalidRequestError for one that does not exist."""
        self._retry_policy.select(_read(PolicyRequest, body).policy)
        return self.policy()

    async def explain(self, body: object) -> dict[str, Any]:
        """The plan for the prompt now, its alternatives, and every worker as seen.

        Nothing is sent. Raises the error with which a request with this prompt would be refused.
        """
        wanted = _read(ExplainRequest, body)
        if (wanted.prompt is None) == (wanted.messages is None):
            raise InvalidRequestError("give either prompt or messages", param="prompt")
        prompt = tuple(wanted.prompt) if isinstance(wanted.prompt, list) else wanted.prompt
        ask = GenerationRequest(
            api="explain",
            served_model=wanted.model or self._reader.models.served_names[0],
            prompts=() if prompt is None else (prompt,),
            messages=messages_of(wanted.messages) if wanted.messages is not None else None,
            options={"max_tokens": wanted.max_tokens, "n": wanted.n},
            output_grammar=output_grammar_of(wanted),
        )
        (work,) = await self._reader.read(ask)
        plan, candidates = self._dispatcher.explain(work)
        grammar = work.output_grammar
        return {
            "prompt_tokens": len(work.prompt),
            "max_tokens": work.sampling.max_tokens,
            "constraint": None if grammar is None else {"kind": grammar.kind, "param": grammar.param},
            **decision(plan),
            "workers": [_worker(one) for one in candidates],
        }


def _worker(one: Candidate) -> dict[str, Any]:
    return copied(
        RoutedWorker,
        one,
        decoding=one.running,
        prefill_tokens_per_s=round(one.prefill_speed.tokens_per_s, 1),
        decode_step_s=round(one.decode_step_s, _DIGITS),
        decode_sequence_s=round(one.decode_sequence_s, _DIGITS),
    )


def _read(kind: type[M], body: object) -> M:
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise from_validation(error, body) from error
