"""Both ends of a raw socket prove that they know the cluster secret; the transports only carry the three messages.

listener ── challenge ──────────────────────────────────────────▶ dialler
listener ◀─ answer to it, own nonce, extra, peer ─────────────── dialler     the answer covers all of the message
listener ── answer to the nonce ────────────────────────────────▶ dialler
"""

from __future__ import annotations

import secrets

from tandem.core.secret import ANSWER_BYTES, NONCE_BYTES, ClusterSecret
from tandem.kvtransfer.transports.base import MAX_PEER_BYTES, LinkClosedError, Peer

MAX_EXTRA_BYTES = 64
MAX_HELLO_BYTES = ANSWER_BYTES + NONCE_BYTES + MAX_EXTRA_BYTES + MAX_PEER_BYTES


class Introduction:
    """The dialler's part. `purpose` names the transport, to which proofs are bound.

    `extra` is the transport's own, of a size both ends know.
    """

    def __init__(self, purpose: bytes, secret: ClusterSecret, peer: Peer, extra: bytes = b"") -> None:
        self._purpose, self._secret = purpose, secret
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._words = self._nonce + extra + peer.encode()
        self._challenge = b""

    def hello(self, challenge: bytes) -> bytes:
        """The second message. Raises LinkClosedError if the first was none."""
        if len(challenge) != NONCE_BYTES:
            raise LinkClosedError("the receiver sent no challenge")
        self._challenge = challenge
        return self._secret.answer(challenge + self._words, self._purpose) + self._words

    def check(self, answer: bytes) -> None:
        """Judge the third message. Raises LinkClosedError."""
        if not self._secret.is_answer(self._nonce + self._challenge, self._purpose + b"-listener", answer):
            raise LinkClosedError("the receiver refused, or does not know the cluster secret")


class HandshakeListener:
    """The listener's part."""

    def __init__(self, purpose: bytes, secret: ClusterSecret, extra_bytes: int = 0) -> None:
        self._purpose, self._secret, self._extra_bytes = purpose, secret, extra_bytes
        self.challenge = secrets.token_bytes(NONCE_BYTES)

    def judge(self, hello: bytes) -> tuple[Peer, bytes, bytes]:
        """Return (the dialling peer, its extra bytes, the answer to send). Raises LinkClosedError."""
        answer, words = hello[:ANSWER_BYTES], hello[ANSWER_BYTES:]
        if not self._secret.is_answer(self.challenge + words, self._purpose, answer):
            raise LinkClosedError("the sender does not know the cluster secret")
        nonce, rest = words[:NONCE_BYTES], words[NONCE_BYTES:]
        try:
            peer = Peer.decode(rest[self._extra_bytes :])
        except ValueError as error:
            raise LinkClosedError(f"the sender did not introduce itself: {error}") from error
        return (
            peer,
            rest[: self._extra_bytes],
            self._secret.answer(nonce + self.challenge, self._purpose + b"-listener"),
        )
