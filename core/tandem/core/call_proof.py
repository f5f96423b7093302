"""Proofs on internal gRPC calls: caller and server show each other that they know the cluster secret.

A call carries one line of metadata: `target ms nonce mac`. The MAC covers method, target, time and nonce, so the line
is of no use for another method or target, after WINDOW_S, or a second time. The server answers in its initial metadata
with a MAC over that line; streams carry nothing before their caller has seen it. The secret crosses no socket.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto
from heapq import heappop, heappush
from typing import Final

from tandem.core.secret import ClusterSecret

STREAM: Final = "/tandem.rpc.v1.Worker/Stream"
PEER: Final = "/tandem.rpc.v1.Worker/Peer"
CONTROL: Final = "/tandem.rpc.v1.Worker/Control"
PROOF_KEY: Final = "x-tandem-proof"
ANSWER_KEY: Final = "x-tandem-answer"
WINDOW_S: Final = 10.0
"""Most that a proof may be older or younger than the clock of the called machine."""
MAX_REMEMBERED: Final = 1 << 16
"""Remembered proofs against replay; beyond, calls are refused. Only a member of the cluster can make one."""
_NONCE_BYTES = 16
_LONGEST = 1024


def stream_target(worker: str, incarnation: int) -> str:
    """Target of a stream of a router or peer. The target of an order is the worker's id alone, in any incarnation."""
    return f"{worker}/{incarnation}"


@dataclass(frozen=True, slots=True)
class CallProof:
    """Proof that a caller sends, and the check of the server's answer."""

    line: str
    _answer: str

    @classmethod
    def of(cls, secret: ClusterSecret, method: str, target: str) -> CallProof:
        """A new proof for one call. `method`: full name, /package.Service/Method; `target`: the called process, without
        spaces."""
        if not target or " " in target:
            raise ValueError(f"a target of a call has characters and no space: {target!r}")
        said = f"{target} {time.time_ns() // 1_000_000} {secrets.token_hex(_NONCE_BYTES)}"
        line = f"{said} {_mac(secret, method, said)}"
        return cls(line, _answer(secret, line))

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata for the call."""
        return ((PROOF_KEY, self.line),)

    def is_answered(self, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
        """True if the server's initial metadata proves that it knows the secret."""
        return secrets.compare_digest(value_of(metadata, ANSWER_KEY), self._answer)


class Refused(Enum):
    """Reason of a refusal: the caller does not know the secret, the target is another one, or the proof is not new."""

    STRANGER = auto()
    ELSEWHERE = auto()
    STALE = auto()


@dataclass(frozen=True, slots=True)
class Refusal:
    kind: Refused
    why: str


class ProofChecker:
    """Checks the proofs of calls to one server; safe to use from several threads.

    A proof from before this object was made is refused: it was made for the process that served here before.
    """

    def __init__(self, secret: ClusterSecret, now_s: Callable[[], float] = time.time) -> None:
        self._secret, self._now_s, self._since_s = secret, now_s, now_s()
        self._lock = threading.Lock()
        self._seen: set[str] = set()
        self._ages: list[tuple[float, str]] = []
        """Heap of the times at which each may be dropped."""

    def refusal(self, line: str, method: str, target: str | None) -> Refusal | None:
        """Why a call with this proof is refused, None if it is not. `target`: this server's; None = any is accepted."""
        said, _, mac = line[:_LONGEST].rpartition(" ")
        words = said.split(" ")
        is_whole = len(words) == 3 and line.isascii()
        if not is_whole or not secrets.compare_digest(mac, _mac(self._secret, method, said)):
            return Refusal(Refused.STRANGER, "the cluster secret is missing or wrong")
        meant, sent_s, nonce = words[0], int(words[1]) / 1000, words[2]
        if target is not None and meant != target:
            return Refusal(Refused.ELSEWHERE, f"the call was meant for {meant}, this is {target}")
        # Remembered first: a proof refused because a clock is ahead would be timely when sent again later.
        why = self._remember(nonce, sent_s + WINDOW_S) or self._untimely(sent_s)
        return Refusal(Refused.STALE, why) if why else None

    def answer(self, line: str) -> tuple[tuple[str, str], ...]:
        """Initial metadata that proves to the caller of `line` that this server knows the secret."""
        return ((ANSWER_KEY, _answer(self._secret, line)),)

    def _untimely(self, sent_s: float) -> str:
        late_s = self._now_s() - sent_s
        if abs(late_s) >= WINDOW_S:
            how = f"{late_s:.1f} s old" if late_s > 0 else f"{-late_s:.1f} s ahead"
            return f"the call's proof is {how}, and {WINDOW_S:g} s are allowed: compare the clocks of both machines"
        if sent_s < self._since_s - 0.001:  # proofs count whole milliseconds
            return "the call is older than this process: call again, or compare the clocks of both machines"
        return ""

    def _remember(self, nonce: str, until_s: float) -> str:
        with self._lock:
            now_s = self._now_s()
            while self._ages and self._ages[0][0] <= now_s:
                self._seen.discard(heappop(self._ages)[1])
            if nonce in self._seen:
                return "the call's proof was used before"
            if until_s <= now_s:  # too old to be accepted at any time
                return ""
            if len(self._seen) >= MAX_REMEMBERED:
                return f"more than {MAX_REMEMBERED} calls came within {2 * WINDOW_S:g} s"
            self._seen.add(nonce)
            heappush(self._ages, (until_s, nonce))
            return ""


def value_of(metadata: Iterable[tuple[str, str | bytes]] | None, key: str) -> str:
    """The last value of a key of gRPC's metadata, "" without one; what is not ASCII has no meaning here."""
    found = ""
    for name, value in metadata or ():
        if name == key:
            found = value if isinstance(value, str) else value.decode("ascii", "replace")
    return found if found.isascii() else ""


def _mac(secret: ClusterSecret, method: str, said: str) -> str:
    return secret.mac(b"call", f"{method} {said}".encode())


def _answer(secret: ClusterSecret, line: str) -> str:
    return secret.mac(b"called", line.encode())
