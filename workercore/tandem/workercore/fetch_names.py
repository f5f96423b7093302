"""Names of fetches on the wire, in ledgers and in books: their request, marked as a fetch.

fetch~chatcmpl-7#1/48213        the hold, at both ends, of transfer 48213 for attempt 1 of chatcmpl-7

A request may be fetched for and handed over between the same two workers at the same time: the mark shows which of the
two a message is about, also after that has ended.
"""

from __future__ import annotations

from tandem.core.ids import Attempt, Incarnation, RequestId, TransferId, WorkerId
from tandem.core.ledger import Holder, HoldKind
from tandem.rpc.v1 import worker_pb2 as w
from tandem.workercore.requests import request_key
from tandem.workercore.role import RoleContext

_MARK = "fetch~"


def fetch_name(request: RequestId) -> RequestId:
    """The request of a fetch's ticket."""
    return RequestId(f"{_MARK}{request}")


def is_fetch(request: str) -> bool:
    return request.startswith(_MARK)


def fetch_holder(kind: HoldKind, name: RequestId, attempt: Attempt, transfer: TransferId) -> Holder:
    """Return the holder of a fetch's blocks: RESERVED at the requester, PUSHING at the holder."""
    return Holder(kind, f"{request_key(name, attempt)}/{transfer}")


def tell_failed(
    context: RoleContext, worker: WorkerId, incarnation: Incarnation, failed: w.TransferFailed, *, address: str = ""
) -> None:
    """Either end gives a fetch up: the other one fences and releases."""
    context.outbox.to_peer(worker, incarnation, w.PeerMessage(failed=failed), address=address)
