"""Keys of block holders: each names the attempt of a request, and the transfer.

request    chatcmpl-7#1#0          attempt 1, choice 0 (or #spare)
reserved   chatcmpl-7#1/48213      attempt 1, transfer 48213
pushing    chatcmpl-7#1/48213
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.ids import Attempt, RequestId, TransferId
from tandem.core.ledger import Holder, HoldKind


@dataclass(frozen=True, slots=True)
class Subject:
    """Owner of a hold. Foreign keys give attempt 0; `transfer` is 0 where there is none."""

    key: str
    """The attempt's key in the engine and the request table."""
    request: RequestId
    attempt: Attempt
    transfer: TransferId


def subject_of(holder: Holder) -> Subject:
    """Read a holder's key; never fails."""
    key, transfer = holder.key, 0
    if holder.kind is HoldKind.REQUEST:
        if key.count("#") >= 2:
            key = key.rpartition("#")[0]
    else:
        head, slash, tail = key.rpartition("/")
        if slash and tail.isdecimal():
            key, transfer = head, int(tail)
    request, mark, attempt = key.rpartition("#")
    if not mark or not attempt.isdecimal():
        return Subject(key, RequestId(key), Attempt(0), TransferId(transfer))
    return Subject(key, RequestId(request), Attempt(int(attempt)), TransferId(transfer))
