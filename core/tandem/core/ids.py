"""Identifiers. Distinct types, so that a type checker refuses a worker id where a request id belongs."""

import secrets
from typing import NewType

RequestId = NewType("RequestId", str)
"""Drawn by the router, unique in the cluster."""
Attempt = NewType("Attempt", int)
"""Counts from 1; raised by the router for every new try of a request. Late answers carry an older one."""
ChoiceIndex = NewType("ChoiceIndex", int)
"""0 … n-1 for a request with `n` choices."""
TransferId = NewType("TransferId", int)
"""63-bit random number drawn by the receiver of a KV transfer."""
WorkerId = NewType("WorkerId", str)
RouterId = NewType("RouterId", str)
Incarnation = NewType("Incarnation", int)
"""63-bit random number drawn at every start, flip and re-registration; fenced by equality, never compared by order."""
GroupId = NewType("GroupId", int)
"""A KV group: layers with the same KV shape and window."""
BlockId = NewType("BlockId", int)
"""Index of a block in the pool of one KV group of one worker."""
Rank = NewType("Rank", int)
"""Tensor-parallel rank inside one worker."""


def new_incarnation() -> Incarnation:
    """A fresh 63-bit incarnation, never 0 (0 means "none")."""
    return Incarnation(secrets.randbits(63) | 1)


def new_transfer_id() -> TransferId:
    """A fresh 63-bit transfer id, never 0."""
    return TransferId(secrets.randbits(63) | 1)


def new_request_id(prefix: str) -> RequestId:
    """A fresh request id such as `chatcmpl-6f0c…`; `prefix` names the API that it came from."""
    return RequestId(f"{prefix}-{secrets.token_hex(12)}")
