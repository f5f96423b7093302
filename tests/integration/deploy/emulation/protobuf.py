"""Secrets as Helm's client sends them: in the binary form that the API of Kubernetes takes besides JSON.

Only what a Secret has is known here; numbers of fields are those of `k8s.io/api/core/v1` and its `meta/v1`.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator

from tests.integration.deploy.emulation.resources import Object, RefusedError

CONTENT_TYPE = "application/vnd.kubernetes.protobuf"
_MAGIC = b"k8s\x00"
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_NAME, _NAMESPACE, _VERSION, _LABELS, _ANNOTATIONS = 1, 3, 6, 11, 12


def decoded(body: bytes) -> Object:
    """A Secret, or only its kind for what asks for nothing else. RefusedError for other kinds."""
    if not body.startswith(_MAGIC):
        raise RefusedError(400, "BadRequest", "the body does not begin as it has to")
    envelope = dict(_fields(body[len(_MAGIC) :]))
    about = dict(_fields(envelope[1]))
    kind = about.get(2, b"").decode()
    if kind == "DeleteOptions":
        return {"kind": kind}
    if kind != "Secret":
        raise RefusedError(415, "UnsupportedMediaType", f"no {kind} is known here in this form")
    return _secret(envelope.get(2, b""))


def _secret(body: bytes) -> Object:
    found: Object = {"apiVersion": "v1", "kind": "Secret", "metadata": {}, "data": {}}
    for number, value in _fields(body):
        if number == 1:
            found["metadata"] = _metadata(value)
        elif number == 2:
            key, content = _entry(value)
            found["data"][key] = base64.b64encode(content).decode()
        elif number == 3:
            found["type"] = value.decode()
        else:
            raise RefusedError(415, "UnsupportedMediaType", f"field {number} of a Secret is not known here")
    return found


def _metadata(body: bytes) -> Object:
    found: Object = {}
    names = {_NAME: "name", _NAMESPACE: "namespace", _VERSION: "resourceVersion"}
    maps = {_LABELS: "labels", _ANNOTATIONS: "annotations"}
    for number, value in _fields(body):
        if number in names and value:
            found[names[number]] = value.decode()
        elif number in maps:
            key, text = _entry(value)
            found.setdefault(maps[number], {})[key] = text.decode()
    return found


def _entry(body: bytes) -> tuple[str, bytes]:
    """Parse one entry of a map."""
    found = dict(_fields(body))
    return found.get(1, b"").decode(), found.get(2, b"")


def _fields(body: bytes) -> Iterator[tuple[int, bytes]]:
    """Numbers and contents of what has a length; what has none is of no interest here."""
    at = 0
    while at < len(body):
        tag, at = _varint(body, at)
        number, form = tag >> 3, tag & 7
        if form == _VARINT:
            _, at = _varint(body, at)
        elif form == _BYTES:
            size, at = _varint(body, at)
            yield number, body[at : at + size]
            at += size
        elif form in (_FIXED64, _FIXED32):
            at += 8 if form == _FIXED64 else 4
        else:
            raise RefusedError(400, "BadRequest", "the body is not understood")


def _varint(body: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = body[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
