"""Routes of the Files API: upload, list, read and delete. Uploads go to disk as they arrive."""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress
from dataclasses import replace
from typing import Any

from fastapi import FastAPI
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.types import Scope

from tandem.core.batch import FileRecord
from tandem.core.errors import (
    CancelledError,
    DeadlineError,
    InvalidRequestError,
    NotFoundError,
    PermissionDeniedError,
    RequestTooLargeError,
    UnavailableError,
    UnsupportedParameterError,
)
from tandem.router.api.http.body_parser import BODY_S, is_foreign
from tandem.router.api.http.middleware import guarded, json_response, tenant_of
from tandem.router.api.http.multipart import MultipartForm, boundary_of
from tandem.router.api.http.paging import page_of
from tandem.router.error_quoting import quoted
from tandem.router.storage.batches.file_store import FileWriter
from tandem.router.storage.files import Files, new_id

LEAST_EXPIRY_S, LONGEST_EXPIRY_S = 3600, 30 * 86_400
_FORM_BYTES = 65_536
"""Length that a form may have beyond its file."""
_CHECK_BYTES = 8 * 1024 * 1024
"""After so many more it is looked whether there is room."""
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"
_RANGE = re.compile(rb"bytes=(\d{1,15})-(\d{0,15})")
_OTHER_PURPOSES = ("assistants", "fine-tune", "vision", "user_data", "evals")


def add_files(app: FastAPI, files: Files) -> None:
    """Put the Files API into `app`."""
    api = _Api(files)
    app.add_route("/v1/files", guarded(api.upload), methods=["POST"])
    app.add_route("/v1/files", guarded(api.list), methods=["GET"])
    app.add_route("/v1/files/{file_id}", guarded(api.read), methods=["GET"])
    app.add_route("/v1/files/{file_id}", guarded(api.delete), methods=["DELETE"])
    app.add_route("/v1/files/{file_id}/content", guarded(api.content), methods=["GET"])


def file_object(record: FileRecord) -> dict[str, Any]:
    return {
        "id": record.id,
        "object": "file",
        "bytes": record.size_bytes,
        "created_at": record.created_s,
        "expires_at": record.expires_s,
        "filename": record.name,
        "purpose": record.purpose,
        "status": "processed",
        "status_details": None,
    }


class _Api:
    def __init__(self, files: Files) -> None:
        self._files, self._max_bytes = files, files.limits.max_file_bytes

    async def upload(self, request: Request) -> Response:
        files = self._files
        if is_foreign(request):
            raise PermissionDeniedError("a page of another origin may not upload files", todo="upload it elsewhere")
        form = MultipartForm(boundary_of(request.headers.get("content-type", "")))
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > self._max_bytes + _FORM_BYTES:
            raise self._too_large()
        await files.check()
        size = min(self._max_bytes, int(declared)) if declared.isdigit() else self._max_bytes
        now_s, tenant = files.wall_s(), tenant_of(request)
        record = FileRecord(
            id=new_id("file-", now_s), tenant=tenant, purpose="", name="", created_s=int(now_s), size_bytes=size
        )
        try:
            await files.check_room(size if declared.isdigit() else 0)
            if not await files.store.begin(record, files.limits.max_tenant_file_bytes):
                raise files.full(await files.store.kept_bytes(tenant))
            record = await self._store(request, form, record)
        except OSError as error:
            raise UnavailableError("the file cannot be stored", why=error.strerror or str(error)) from error
        return json_response(file_object(record))

    async def list(self, request: Request) -> Response:
        page = page_of(request, largest=10_000, default=10_000)
        purpose = request.query_params.get("purpose")
        records, has_more = await self._files.store.list(
            tenant_of(request), after=page.after, limit=page.limit, is_ascending=page.is_ascending, purpose=purpose
        )
        return json_response(page.listed([file_object(record) for record in records], has_more=has_more))

    async def read(self, request: Request) -> Response:
        return json_response(file_object(await self._named(request)))

    async def content(self, request: Request) -> Response:
        await self._files.check()
        record = await self._named(request)
        path = self._files.folder.file(record.id)
        if not await asyncio.to_thread(path.is_file):
            raise NotFoundError(f"the bytes of the file {record.id} are gone", param="file_id")
        _leave_out_odd_range(request.scope, record.size_bytes)
        return FileResponse(path, media_type="application/octet-stream", filename=record.name)

    async def delete(self, request: Request) -> Response:
        await self._files.check()
        record = await self._named(request)
        await self._files.remove(record.id)
        return json_response({"id": record.id, "object": "file", "deleted": True})

    async def _named(self, request: Request) -> FileRecord:
        return await self._files.load(tenant_of(request), request.path_params["file_id"])

    async def _store(self, request: Request, form: MultipartForm, record: FileRecord) -> FileRecord:
        """Receive the file of a record that is written down; what does not become whole is removed again."""
        try:
            size = await self._receive(request, form, record.id)
            expires_s = record.created_s + _expiry_s(form.fields, self._files.expiry_s)
            name = (form.file_name or "")[:255]
            whole = replace(record, purpose="batch", name=name, size_bytes=size, expires_s=expires_s)
            await self._files.store.finish(whole)
        except BaseException:
            with suppress(UnavailableError, OSError):  # it is due in a day anyway
                await asyncio.shield(self._files.remove(record.id))
            raise
        return replace(whole, is_uploaded=True)

    async def _receive(self, request: Request, form: MultipartForm, file: str) -> int:
        """Write the file of a form as it arrives; returns its size once it is whole and on disk. Raises OSError."""
        writer = self._files.folder.writer(file)
        try:
            await self._copy(request, form, writer)
            form.finish()
            _check_fields(form.fields)
            await asyncio.to_thread(writer.commit)
        finally:
            await asyncio.shield(asyncio.to_thread(writer.abort))
        return writer.size_bytes

    async def _copy(self, request: Request, form: MultipartForm, writer: FileWriter) -> None:
        parts = aiter(request.stream())
        total = 0
        while True:
            try:
                async with asyncio.timeout(BODY_S):
                    part = await anext(parts, None)
            except ClientDisconnect:
                raise CancelledError("the client disconnected while sending the file") from None
            except TimeoutError:
                why = f"nothing arrived for {BODY_S:g} s"
                raise DeadlineError("the file did not arrive", why=why, todo="send it again") from None
            if part is None:
                return
            total += len(part)
            data = form.feed(part)
            if writer.size_bytes + len(data) > self._max_bytes or total > self._max_bytes + _FORM_BYTES:
                raise self._too_large()
            if data:
                await asyncio.to_thread(writer.write, data)
                if writer.size_bytes // _CHECK_BYTES > (writer.size_bytes - len(data)) // _CHECK_BYTES:
                    await self._files.check_room()

    def _too_large(self) -> RequestTooLargeError:
        why = f"the limit is {self._max_bytes} bytes"
        return RequestTooLargeError("the file is too large", why=why, todo="split it", param="file")


def _leave_out_odd_range(scope: Scope, size_bytes: int) -> None:
    """One range of bytes that the file has is answered; others are ignored, as HTTP allows, and the file sent whole."""
    kept = []
    for name, value in scope["headers"]:
        if name == b"range":
            found = _RANGE.fullmatch(value)
            if found is None or int(found[1]) >= size_bytes or (found[2] and int(found[2]) < int(found[1])):
                continue
        kept.append((name, value))
    scope["headers"] = kept


def _check_fields(fields: dict[str, str]) -> None:
    purpose = fields.get("purpose")
    if purpose is None:
        raise InvalidRequestError("purpose is missing", todo="send purpose=batch", param="purpose")
    if purpose in _OTHER_PURPOSES:
        raise UnsupportedParameterError(
            f"the purpose {quoted(purpose)} is not supported", todo="send purpose=batch", param="purpose"
        )
    if purpose != "batch":
        raise InvalidRequestError(f"purpose is {quoted(purpose)}", why="it must be batch", param="purpose")
    for name in fields.keys() - {"purpose", _ANCHOR, _SECONDS}:
        todo = "remove it or correct its name"
        raise InvalidRequestError(f"unknown parameter {quoted(name)}", todo=todo, param=quoted(name)[1:-1])
    _expiry_s(fields, 0)


def _expiry_s(fields: dict[str, str], otherwise_s: float) -> int:
    """Seconds that the file is kept."""
    anchor, seconds = fields.get(_ANCHOR), fields.get(_SECONDS)
    if anchor is None and seconds is None:
        return int(otherwise_s)
    if anchor != "created_at":
        raise InvalidRequestError("expires_after[anchor] must be created_at", param=_ANCHOR)
    given = int(seconds) if seconds and seconds.isascii() and seconds.isdigit() and len(seconds) < 10 else 0
    if not LEAST_EXPIRY_S <= given <= LONGEST_EXPIRY_S:
        why = f"it must be {LEAST_EXPIRY_S} to {LONGEST_EXPIRY_S}"
        raise InvalidRequestError("expires_after[seconds] is wrong", why=why, param=_SECONDS)
    return given
