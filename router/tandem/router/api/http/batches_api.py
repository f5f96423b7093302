"""Routes of the Batches API: create, list, read and cancel. The router that owns the directory runs the batches."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import FastAPI
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from tandem.core.batch import BatchRecord
from tandem.core.errors import (
    InvalidRequestError,
    NotFoundError,
    QuotaError,
    UnavailableError,
    UnsupportedParameterError,
)
from tandem.router.api.http.body_parser import read_json
from tandem.router.api.http.middleware import guarded, json_response, tenant_of
from tandem.router.api.http.paging import page_of
from tandem.router.api.http.responses.schemas import Metadata
from tandem.router.api.http.schemas import Name
from tandem.router.api.http.strict_models import Strict
from tandem.router.error_quoting import quoted
from tandem.router.storage.batches import state_machine
from tandem.router.storage.batches.file_store import is_id
from tandem.router.storage.files import Files, new_id
from tandem.statestore.stores.batches import BatchStore, Opened, Saved

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
_TRIES = 20


class ExpiresAfter(Strict):
    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=3600, le=30 * 86_400)]


class BatchRequest(Strict):
    input_file_id: Name
    endpoint: Name
    completion_window: Name
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


def add_batches(app: FastAPI, batches: BatchStore, files: Files, max_body_bytes: int) -> None:
    """Put the Batches API into `app`."""
    api = _Api(batches, files, max_body_bytes)
    app.add_route("/v1/batches", guarded(api.create), methods=["POST"])
    app.add_route("/v1/batches", guarded(api.list), methods=["GET"])
    app.add_route("/v1/batches/{batch_id}", guarded(api.read), methods=["GET"])
    app.add_route("/v1/batches/{batch_id}/cancel", guarded(api.cancel), methods=["POST"])


def batch_object(record: BatchRecord) -> dict[str, Any]:
    errors = [asdict(error) for error in record.errors]
    return {
        "id": record.id,
        "object": "batch",
        "endpoint": record.endpoint,
        "model": record.model,
        "errors": {"object": "list", "data": errors} if errors else None,
        "input_file_id": record.input_file,
        "completion_window": "24h",
        "status": record.status.value,
        "output_file_id": record.output_file,
        "error_file_id": record.error_file,
        "created_at": record.created_s,
        "in_progress_at": record.in_progress_s,
        "expires_at": record.expires_s,
        "finalizing_at": record.finalizing_s,
        "completed_at": record.completed_s,
        "failed_at": record.failed_s,
        "expired_at": record.expired_s,
        "cancelling_at": record.cancelling_s,
        "cancelled_at": record.cancelled_s,
        "request_counts": {"total": record.total, "completed": record.completed, "failed": record.failed},
        "usage": {
            "input_tokens": record.input_tokens,
            "input_tokens_details": {"cached_tokens": record.cached_tokens},
            "output_tokens": record.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": record.input_tokens + record.output_tokens,
        },
        "metadata": record.metadata,
    }


class _Api:
    def __init__(self, batches: BatchStore, files: Files, max_body_bytes: int) -> None:
        self._batches, self._files, self._max_body_bytes = batches, files, max_body_bytes

    async def create(self, request: Request) -> Response:
        body = await read_json(request, self._max_body_bytes, BatchRequest)
        _check(body)
        files = self._files
        await files.check()
        tenant = tenant_of(request)
        file = await files.load(tenant, body.input_file_id)
        if file.purpose != "batch":
            raise InvalidRequestError(
                f"the file {file.id} is not an input file of a batch",
                todo="upload it with purpose=batch",
                param="input_file_id",
            )
        await self._check_room()
        now_s = files.wall_s()
        record = BatchRecord(
            id=new_id("batch_", now_s),
            tenant=tenant,
            endpoint=body.endpoint,
            input_file=file.id,
            created_s=int(now_s),
            expires_s=int(now_s) + state_machine.WINDOW_S,
            metadata=body.metadata,
            output_expires_after_s=body.output_expires_after.seconds if body.output_expires_after else None,
        )
        await self._take_input(record)
        await self._open(record, file.size_bytes)
        return json_response(batch_object(record))

    async def list(self, request: Request) -> Response:
        page = page_of(request, largest=100, default=20)
        records, has_more = await self._batches.list(tenant_of(request), after=page.after, limit=page.limit)
        return json_response(page.listed([batch_object(record) for record in records], has_more=has_more))

    async def read(self, request: Request) -> Response:
        return json_response(batch_object(await self._named(request)))

    async def cancel(self, request: Request) -> Response:
        for _ in range(_TRIES):
            record = await self._named(request)
            asked = state_machine.cancel_asked(record, self._files.wall_s())
            if asked is record or await self._batches.save(asked) is Saved.DONE:
                return json_response(batch_object(asked))
        raise UnavailableError("the batch keeps changing", todo="try again")

    async def _named(self, request: Request) -> BatchRecord:
        name = request.path_params["batch_id"]
        record = await self._batches.load(name) if is_id(name) else None
        if record is None or record.tenant != tenant_of(request):
            raise NotFoundError(f"there is no batch {quoted(name)}", param="batch_id")
        return record

    async def _check_room(self) -> None:
        try:
            await self._files.check_room()
        except OSError as error:
            raise UnavailableError("the batch cannot be stored", why=error.strerror or str(error)) from error

    async def _open(self, record: BatchRecord, input_bytes: int) -> None:
        """Write it down; QuotaError when its tenant has too many open, or keeps too much, and then its work is gone."""
        limits = self._files.limits
        opened = await self._batches.open_new(
            record,
            input_bytes=input_bytes,
            most_open=limits.max_tenant_open_batches,
            most_bytes=limits.max_tenant_file_bytes,
        )
        if opened is Opened.DONE:
            return
        await asyncio.to_thread(self._files.folder.remove_work, record.id)
        if opened is Opened.TOO_LARGE:
            raise self._files.full(await self._files.store.kept_bytes(record.tenant))
        why = f"max_tenant_open_batches is {limits.max_tenant_open_batches}"
        raise QuotaError("too many batches are open", why=why, todo="wait for some to end, or cancel them")

    async def _take_input(self, record: BatchRecord) -> None:
        """From here on the batch has its input, whatever becomes of the file."""
        try:
            await asyncio.to_thread(self._files.folder.take_input, record.id, record.input_file)
        except FileNotFoundError:
            raise NotFoundError(f"the bytes of the file {record.input_file} are gone", param="input_file_id") from None
        except OSError as error:
            raise UnavailableError("the batch cannot be stored", why=error.strerror or str(error)) from error


def _check(body: BatchRequest) -> None:
    if body.completion_window != "24h":
        given = quoted(body.completion_window)
        raise InvalidRequestError(f"completion_window is {given}", why="it must be 24h", param="completion_window")
    if body.endpoint not in ENDPOINTS:
        raise UnsupportedParameterError(
            f"batches for {quoted(body.endpoint)} are not supported",
            todo=f"use one of {', '.join(ENDPOINTS)}",
            param="endpoint",
        )
