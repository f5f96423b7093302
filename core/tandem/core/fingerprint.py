"""The identity of a served model: properties that must be equal for two workers to exchange KV blocks."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """Every field that changes KV bytes. `revision` is a hub commit, or for a folder a digest of its contents."""

    model: str
    revision: str
    rope: str
    adapter: str
    weight_quantisation: str
    compute_dtype: str
    tokenizer: str

    def digest(self) -> str:
        """32 hex characters; equal exactly when all fields are equal."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:32]
