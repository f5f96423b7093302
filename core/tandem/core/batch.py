"""Records of files and batches as the durable store keeps them, and their JSON form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from types import NoneType
from typing import Any


class BatchStatus(StrEnum):
    """Status of a batch, in OpenAI's words."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def is_over(self) -> bool:
        """True if the batch changes no more."""
        return self in (BatchStatus.FAILED, BatchStatus.COMPLETED, BatchStatus.EXPIRED, BatchStatus.CANCELLED)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """A file of a tenant. Its bytes lie in the directory for files under its id once `is_uploaded`."""

    id: str
    tenant: str
    purpose: str
    name: str
    created_s: int
    size_bytes: int = 0
    expires_s: int | None = None
    is_uploaded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LineError:
    """One error in the input of a batch; `line` counts from 1, None = the whole input."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRecord:
    """A batch. `version` counts its changes from 1; times are seconds since 1970."""

    id: str
    tenant: str
    endpoint: str
    input_file: str
    created_s: int
    expires_s: int
    version: int = 1
    status: BatchStatus = BatchStatus.VALIDATING
    metadata: Mapping[str, str] | None = None
    output_expires_after_s: int | None = None
    model: str | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    errors: tuple[LineError, ...] = ()
    output_file: str | None = None
    error_file: str | None = None
    in_progress_s: int | None = None
    finalizing_s: int | None = None
    completed_s: int | None = None
    failed_s: int | None = None
    expired_s: int | None = None
    cancelling_s: int | None = None
    cancelled_s: int | None = None

    @property
    def ended_s(self) -> int:
        """When it ended; when it was created, while it has not."""
        ends = (self.completed_s, self.failed_s, self.expired_s, self.cancelled_s)
        return max((end for end in ends if end is not None), default=self.created_s)


def to_json(record: FileRecord | BatchRecord) -> str:
    """One line of JSON with every field."""
    return json.dumps(asdict(record), separators=(",", ":"))


def file_from_json(text: bytes | str) -> FileRecord:
    """The record; ValueError when it is none, or a field has the wrong type. Unknown fields are left out."""
    try:
        return FileRecord(**_known(FileRecord, text))
    except TypeError as error:
        raise ValueError(f"not a record of a file: {error}") from None


def batch_from_json(text: bytes | str) -> BatchRecord:
    """The record; ValueError when it is none, or a field has the wrong type. Unknown fields are left out."""
    try:
        values = _known(BatchRecord, text)
        values["status"] = BatchStatus(values["status"])
        values["errors"] = tuple(LineError(**error) for error in values["errors"])
        return BatchRecord(**values)
    except (TypeError, KeyError) as error:
        raise ValueError(f"not a record of a batch: {error}") from None


def _known(kind: type[FileRecord] | type[BatchRecord], text: bytes | str) -> dict[str, Any]:
    raw = json.loads(text)
    if not isinstance(raw, dict):
        raise ValueError("not a JSON object")
    values = {field.name: raw[field.name] for field in fields(kind) if field.name in raw}
    for field in fields(kind):
        types = _TYPES.get(str(field.type))
        if types is not None and field.name in values and type(values[field.name]) not in types:
            raise ValueError(f"{field.name} is not {field.type}")
    return values


_TYPES: Mapping[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "bool": (bool,),
    "str | None": (str, NoneType),
    "int | None": (int, NoneType),
    "Mapping[str, str] | None": (dict, NoneType),
}
"""In JSON, by the annotation as written; the others are made, and so checked, by their readers."""
