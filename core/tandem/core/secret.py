"""The cluster secret: one random value that authenticates every internal RPC and transfer connection.

The secret itself never crosses a socket. RPCs carry a proof of one call (call_proof.py); raw sockets run a challenge:
the listener sends a nonce, the dialler answers with an HMAC over it. Comparisons take constant time.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from pathlib import Path

from tandem.core.errors import ConfigError
from tandem.core.files import write_private

NONCE_BYTES = 32
ANSWER_BYTES = 32
_MIN_BYTES = 16


class ClusterSecret:
    """Holds the secret; never prints it."""

    def __init__(self, value: bytes) -> None:
        if len(value) < _MIN_BYTES:
            raise ConfigError(
                "the cluster secret is too short",
                why=f"{len(value)} bytes, at least {_MIN_BYTES} are needed",
                todo="create one with `clusterctl up` or `openssl rand -hex 32`",
            )
        self._value = value

    def __repr__(self) -> str:
        return "ClusterSecret(…)"

    @classmethod
    def generate(cls) -> ClusterSecret:
        return cls(secrets.token_hex(32).encode())

    @classmethod
    def load(cls, path: Path) -> ClusterSecret:
        """Read the secret from a file of mode 0600; raises ConfigError if it is missing or too short."""
        try:
            return cls(path.read_bytes().strip())
        except OSError as error:
            what = f"cannot read the cluster secret {path}"
            raise ConfigError(what, why=error.strerror or str(error), todo="Check the path") from error

    def save(self, path: Path) -> None:
        """Write the secret to a new file of mode 0600."""
        write_private(path, self._value)

    def mac(self, purpose: bytes, message: bytes) -> str:
        """HMAC-SHA-256 over a message of one kind, in hex; `purpose` holds no colon."""
        return self._mac(b"mac:" + purpose + b":" + message).hex()

    def answer(self, nonce: bytes, purpose: bytes) -> bytes:
        """The dialler's 32-byte answer to a listener's `nonce`; `purpose` binds it to one kind of connection."""
        return self._mac(b"socket:" + purpose + b":" + nonce)

    def is_answer(self, nonce: bytes, purpose: bytes, answer: bytes) -> bool:
        return hmac.compare_digest(answer, self.answer(nonce, purpose))

    def derive(self, purpose: bytes) -> bytes:
        """32 bytes for another use (a tenant's salt, a Redis password), one-way from the secret."""
        return self._mac(b"derive:" + purpose)

    def _mac(self, message: bytes) -> bytes:
        return hmac.new(self._value, message, hashlib.sha256).digest()
