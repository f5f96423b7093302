"""A conversation: the items that a request adds, the ones before it, and its storage for the next turn."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from tandem.core.errors import InvalidRequestError, NotFoundError, QuotaError, RequestTooLargeError, UnavailableError
from tandem.core.logs import event
from tandem.router.api.http.responses.items import Item, ItemPart, MessageItem, ReasoningItem
from tandem.router.api.http.responses.objects import text_part
from tandem.router.api.http.schemas import RefusalPart
from tandem.router.error_quoting import quoted
from tandem.router.tokenization.chat_template import THOUGHT_NAMES
from tandem.statestore.stores.responses import ResponseStore, StoredResponse

_log = logging.getLogger(__name__)
MAX_TURNS = 1000
SAVE_S = 2.0
_ID = re.compile(r"resp_[A-Za-z0-9]{1,64}")
Message = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """The conversation that a request continues: the responses before it, oldest first, and all of their messages."""

    chain: tuple[str, ...] = ()
    messages: tuple[Message, ...] = ()


class ConversationStore:
    """Stored responses as the API needs them."""

    def __init__(self, store: ResponseStore, most_bytes: int) -> None:
        """`most_bytes`: of one response."""
        self._store, self._most_bytes = store, most_bytes

    async def past(self, tenant: str, previous: str | None) -> Past:
        """The conversation that `previous` ended; InvalidRequestError when it, or one that it continued, is not stored
        (any more).

        Raises UnavailableError when Redis does not answer.
        """
        if previous is None:
            return Past()
        stored = await self._store.load(tenant, previous) if _ID.fullmatch(previous) else None
        if stored is None:
            raise _not_stored(previous, "it expired, was deleted, or was never stored here")
        chain = (*stored.chain, previous)
        if len(chain) > MAX_TURNS:
            why = f"a conversation can be continued {MAX_TURNS} times"
            raise _not_stored(previous, why, todo="send the conversation in input")
        turns = await self._store.turns(tenant, chain)
        messages: list[Message] = []
        for response, turn in zip(chain, turns, strict=True):
            if turn is None:
                raise _not_stored(previous, f"the response {quoted(response)} before it is not stored any more")
            messages.extend(orjson.loads(turn))
        return Past(chain=chain, messages=tuple(messages))

    async def check_room(self, response: StoredResponse) -> None:
        """RequestTooLargeError or QuotaError when it could not be stored even with an empty answer."""
        todo = "send store: false"
        if response.size_bytes > self._most_bytes:
            why = f"max_response_bytes is {self._most_bytes}, and without its answer it has {response.size_bytes}"
            raise RequestTooLargeError("the response is too large to be stored", why=why, todo=todo, param="input")
        try:
            async with asyncio.timeout(SAVE_S):
                kept_bytes = await self._store.kept_bytes(response.tenant)
        except (UnavailableError, TimeoutError):
            return  # then it cannot be stored, and the response states so
        if kept_bytes + response.size_bytes > self._store.most_bytes:
            why = f"max_tenant_response_bytes is {self._store.most_bytes}, and {kept_bytes} are kept"
            raise QuotaError("no more responses can be stored", why=why, todo=f"delete some, or {todo}", param="store")

    async def keep(self, response: StoredResponse) -> bool:
        """Store it for later turns; False, with a line in the log, when that did not work."""
        why = ""
        try:
            async with asyncio.timeout(SAVE_S):
                if response.size_bytes > self._most_bytes:
                    why = f"it has {response.size_bytes} bytes"
                elif not await self._store.save(response):
                    why = "its tenant keeps as many as it may"
        except (UnavailableError, TimeoutError) as error:
            why = str(error)
        if why:
            event(_log, "response not stored", logging.WARNING, response=response.id, why=why)
        return not why

    async def load(self, tenant: str, response: str) -> StoredResponse:
        """A stored response; NotFoundError when there is none, UnavailableError when Redis does not answer."""
        stored = await self._store.load(tenant, response) if _ID.fullmatch(response) else None
        if stored is None:
            why = "it expired, was deleted, or was never stored here"
            raise NotFoundError(f"there is no response {quoted(response)}", why=why, param="response_id")
        return stored

    async def delete(self, tenant: str, response: str) -> None:
        """Forget a stored response; NotFoundError when there is none, UnavailableError when Redis does not answer."""
        await self._store.delete(tenant, (await self.load(tenant, response)).id)


def new_id(prefix: str) -> str:
    """A fresh id such as `resp_6f0c…`."""
    return f"{prefix}_{secrets.token_hex(16)}"


def items_of(given: str | Sequence[Item]) -> list[dict[str, Any]]:
    """The request's input as items with ids, as the API lists them."""
    if isinstance(given, str):
        return [_message(MessageItem(role="user", content=given))]
    return [_reasoning(item) if isinstance(item, ReasoningItem) else _message(item) for item in given]


def messages_of(items: Sequence[dict[str, Any]]) -> tuple[Message, ...]:
    """Items as messages with one text as content, as they are kept for later turns. Reasoning is part of the answer
    that follows it, of an empty one where none does; a summary of it is no message, nor is what is encrypted."""
    messages: list[Message] = []
    thoughts: list[str] = []
    for item in items:
        if item["type"] == "reasoning":
            thoughts += [part["text"] for part in item.get("content", ()) if part["text"]]
            continue
        if item["role"] != "assistant":
            messages += _unsaid(thoughts)
            thoughts = []
        content = "\n".join(part["refusal" if part["type"] == "refusal" else "text"] for part in item["content"])
        messages.append({"role": item["role"], "content": content, **_thought(thoughts)})
        thoughts = []
    return (*messages, *_unsaid(thoughts))


def for_template(message: Message) -> Message:
    """A message of `messages_of` with its thought under every name that a chat template reads."""
    thought = message.get(THOUGHT_NAMES[0])
    return message if thought is None else message | dict.fromkeys(THOUGHT_NAMES, thought)


def _unsaid(thoughts: Sequence[str]) -> list[Message]:
    return [{"role": "assistant", "content": "", **_thought(thoughts)}] if thoughts else []


def _thought(thoughts: Sequence[str]) -> dict[str, str]:
    return {THOUGHT_NAMES[0]: "\n".join(thoughts)} if thoughts else {}


def _message(item: MessageItem) -> dict[str, Any]:
    parts: Sequence[str | ItemPart | RefusalPart] = (item.content,) if isinstance(item.content, str) else item.content
    kept = _output if item.role == "assistant" else _input
    return {
        "id": item.id or new_id("msg"),
        "type": "message",
        "role": item.role,
        "status": item.status or "completed",
        "content": [kept(part) for part in parts],
    }


def _reasoning(item: ReasoningItem) -> dict[str, Any]:
    return {**item.model_dump(exclude_none=True), "id": item.id or new_id("rs")}


def _output(part: str | ItemPart | RefusalPart) -> dict[str, Any]:
    if isinstance(part, RefusalPart):
        return {"type": "refusal", "refusal": part.refusal}
    if isinstance(part, str):
        return text_part(part)
    said = text_part(part.text)
    if part.annotations:
        said["annotations"] = part.annotations
    if part.logprobs:
        said["logprobs"] = [one.model_dump(exclude_none=True) for one in part.logprobs]
    return said


def _input(part: str | ItemPart | RefusalPart) -> dict[str, Any]:
    if isinstance(part, ItemPart):
        return {"type": "input_text", "text": part.text}
    return {"type": "input_text", "text": part if isinstance(part, str) else part.refusal}


def _not_stored(response: str, why: str, todo: str = "") -> InvalidRequestError:
    what = f"the conversation of the response {quoted(response)} cannot be continued"
    return InvalidRequestError(what, why=why, todo=todo, param="previous_response_id")
