"""Operators' requests about routing: the policy in force, a change of it, and an explanation of where a prompt would
go."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tandem.core.config import PolicyName
from tandem.core.errors import InvalidRequestError
from tandem.router.api.http.body_parser import messages_of
from tandem.router.api.http.errors import from_validation
from tandem.router.api.http.schemas import Message
from tandem.router.dispatch.dispatcher import Dispatcher
from tandem.router.routing.decision import decision
from tandem.router.routing.plan import Candidate
from tandem.router.routing.policy_switch import PolicySwitch
from tandem.router.serving.request_parser import ApiRequest, RequestParser

_DIGITS = 6
M = TypeVar("M", bound=BaseModel)


class ExplainRequest(BaseModel):
    """Exactly one of `prompt` (text or token ids) and `messages`. `model` None = the first that is served."""

    model_config = ConfigDict(extra="forbid", strict=True)

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

    def __init__(self, reader: RequestParser, dispatcher: Dispatcher, switch: PolicySwitch) -> None:
        self._reader, self._dispatcher, self._switch = reader, dispatcher, switch

    def policy(self) -> dict[str, Any]:
        """The policy in force, and all that there are."""
        return {"policy": self._switch.name, "policies": list(PolicyName)}

    def select(self, body: object) -> dict[str, Any]:
        """Change the policy; requests in flight keep their plans. InvalidRequestError for one that does not exist."""
        self._switch.select(_read(PolicyRequest, body).policy)
        return self.policy()

    async def explain(self, body: object) -> dict[str, Any]:
        """The plan for the prompt now, its alternatives, and every worker as seen.

        Nothing is sent. Raises the error with which a request with this prompt would be refused.
        """
        wanted = _read(ExplainRequest, body)
        if (wanted.prompt is None) == (wanted.messages is None):
            raise InvalidRequestError("give either prompt or messages", param="prompt")
        prompt = tuple(wanted.prompt) if isinstance(wanted.prompt, list) else wanted.prompt
        ask = ApiRequest(
            api="explain",
            model=wanted.model or self._reader.models.served_names[0],
            prompts=() if prompt is None else (prompt,),
            messages=messages_of(wanted.messages) if wanted.messages is not None else None,
            sampling={"max_tokens": wanted.max_tokens, "n": wanted.n},
        )
        (work,) = await self._reader.read(ask)
        plan, candidates = self._dispatcher.explain(work)
        return {
            "prompt_tokens": len(work.prompt),
            "max_tokens": work.sampling.max_tokens,
            **decision(plan),
            "workers": [_worker(one) for one in candidates],
        }


def _worker(one: Candidate) -> dict[str, Any]:
    return {
        "worker": one.worker,
        "role": one.role.value,
        "queued_tokens": one.queued_tokens,
        "queued_requests": one.queued_requests,
        "in_flight": one.in_flight,
        "decoding": one.running,
        "held_tokens": one.held_tokens,
        "reusable_tokens": one.reusable_tokens,
        "free_blocks": one.free_blocks,
        "total_blocks": one.total_blocks,
        "prefill_tokens_per_s": round(one.prefill_speed.tokens_per_s, 1),
        "decode_step_s": round(one.decode_step_s, _DIGITS),
        "decode_sequence_s": round(one.decode_sequence_s, _DIGITS),
    }


def _read(kind: type[M], body: object) -> M:
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise from_validation(error, body) from error
