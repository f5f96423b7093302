"""Stored conversations: the messages before a request, and the storage of its response for the next turn."""

from __future__ import annotations

import asyncio
import logging
import re
from dataclasses import dataclass

import orjson

from tandem.core.errors import InvalidRequestError, NotFoundError, QuotaError, RequestTooLargeError, UnavailableError
from tandem.core.logs import event
from tandem.router.api.http.responses.chat import Message
from tandem.router.error_quoting import quoted
from tandem.statestore.stores.responses import ResponseStore, StoredResponse

_log = logging.getLogger(__name__)
MAX_TURNS = 1000
SAVE_S = 2.0
_ID = re.compile(r"resp_[A-Za-z0-9]{1,64}")


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


def _not_stored(response: str, why: str, todo: str = "") -> InvalidRequestError:
    what = f"the conversation of the response {quoted(response)} cannot be continued"
    return InvalidRequestError(what, why=why, todo=todo, param="previous_response_id")
