"""Records that members of a cluster register about themselves, and their JSON form."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from tandem.core.ids import Incarnation, RouterId, WorkerId
from tandem.core.state_enums import WorkerState


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRecord:
    """A worker in the registry; the same content as `WorkerInfo` in router_stream.proto."""

    worker: WorkerId
    incarnation: Incarnation
    role: str
    address: str
    """host:port of its gRPC server."""
    model: str
    fingerprint: str
    tp: int = 1
    block_tokens: int = 16
    kv_dtype: str = ""
    max_model_len: int = 0
    vocab_size: int = 0
    num_blocks: tuple[int, ...] = ()
    """Blocks of each KV group, in group order."""
    token_kv_bytes: int = 0
    transports: tuple[str, ...] = ()
    protocol: int = 1
    eos_token_ids: tuple[int, ...] = ()
    pid: int = 0
    rank_pids: tuple[int, ...] = ()
    state: str = WorkerState.READY.value
    """Availability for new work."""

    @property
    def member(self) -> str:
        """The id of its lease."""
        return self.worker

    @classmethod
    def from_json(cls, text: bytes | str) -> WorkerRecord:
        """The record; ValueError when a field is missing or has the wrong type. Unknown fields are left out."""
        return cls(**_decoded(cls, text))


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterRecord:
    """A router in the registry. Addresses are host:port; "" = does not listen."""

    router: RouterId
    incarnation: Incarnation
    http_address: str = ""
    grpc_address: str = ""
    admin_address: str = ""
    pid: int = 0

    @property
    def member(self) -> str:
        """The id of its lease."""
        return self.router

    @classmethod
    def from_json(cls, text: bytes | str) -> RouterRecord:
        """The record; ValueError when a field is missing or has the wrong type. Unknown fields are left out."""
        return cls(**_decoded(cls, text))


Record = WorkerRecord | RouterRecord


def to_json(record: Record) -> str:
    """One line of JSON with every field."""
    return json.dumps(asdict(record), separators=(",", ":"))


def _decoded(cls: type[Record], text: bytes | str) -> dict[str, Any]:
    raw = json.loads(text)
    if not isinstance(raw, dict):
        raise ValueError(f"{cls.__name__} is not a JSON object")
    values: dict[str, Any] = {}
    for field in fields(cls):
        if field.name not in raw:
            raise ValueError(f"{cls.__name__} lacks {field.name!r}")
        values[field.name] = _checked(field.name, str(field.type), raw[field.name])
    return values


def _checked(name: str, kind: str, value: Any) -> Any:
    """`kind` is the annotation as written: ids and incarnations are plain str and int in JSON."""
    if kind.startswith("tuple["):
        item = str if kind.startswith("tuple[str") else int
        if isinstance(value, list) and all(type(entry) is item for entry in value):
            return tuple(value)
    elif type(value) is (int if kind in ("int", "Incarnation") else str):
        return value
    raise ValueError(f"field {name!r} is not {kind}: {value!r}")
