"""Assembles clients' stored data: responses, files, batches, and the runner of those."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI
from redis.asyncio import Redis

from tandem.core.clock import Clock
from tandem.core.config import StoreSection
from tandem.router.api.frontend import Frontend
from tandem.router.api.http.batches_api import add_batches
from tandem.router.api.http.files_api import add_files
from tandem.router.api.http.responses_api import add_responses
from tandem.router.storage.batches.asgi_client import InProcess
from tandem.router.storage.batches.file_store import FilesFolder
from tandem.router.storage.batches.input_file import Limits
from tandem.router.storage.batches.runner import LEASE_S, BatchRunner
from tandem.router.storage.files import Files, KeptLimits
from tandem.statestore.keys import Keys
from tandem.statestore.memory import MemoryWatch
from tandem.statestore.pubsub import Wakeups
from tandem.statestore.stores.batches import BatchStore
from tandem.statestore.stores.files import FileStore
from tandem.statestore.stores.owner_lease import OwnerLease
from tandem.statestore.stores.responses import ResponseStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """`files` is None where no directory is configured: then there are no files and no batches."""

    section: StoreSection
    responses: ResponseStore
    batches: BatchStore
    files: Files | None
    lease: OwnerLease
    wakeups: Wakeups
    memory: MemoryWatch

    def add_routes(self, app: FastAPI, frontend: Frontend) -> None:
        add_responses(app, frontend, self.responses, self.section.max_response_bytes)
        if self.files is not None:
            add_files(app, self.files)
            add_batches(app, self.batches, self.files, frontend.settings.max_body_bytes)

    def runner(self, app: FastAPI, frontend: Frontend, clock: Clock, waiting: Callable[[], int]) -> BatchRunner | None:
        """Return the runner of batches here; `waiting` gives how many interactive requests wait."""
        if self.files is None:
            return None
        runner = BatchRunner(
            batches=self.batches,
            files=self.files,
            lease=self.lease,
            wakeups=self.wakeups,
            calls=InProcess(app),
            clock=clock,
            models=lambda: frozenset(frontend.models.served_names),
            waiting=waiting,
            serves=frontend.gate.serves,
            limits=Limits(
                max_requests=self.section.max_batch_requests, max_line_bytes=frontend.settings.max_body_bytes
            ),
            at_once=self.section.batch_requests_at_once,
        )
        frontend.metrics.watch_batches(lambda: runner.running)
        return runner


def open_storage(redis: Redis, keys: Keys, section: StoreSection) -> Storage:
    """On this Redis; nothing is read or written yet."""
    folder = FilesFolder(Path(section.dir)) if section.dir else None
    limits = KeptLimits(
        max_file_bytes=section.max_file_bytes,
        max_tenant_file_bytes=section.max_tenant_file_bytes,
        max_tenant_open_batches=section.max_tenant_open_batches,
        min_free_bytes=section.min_free_bytes,
    )
    return Storage(
        section=section,
        responses=ResponseStore(redis, keys, section.response_expiry_s, section.max_tenant_response_bytes),
        batches=BatchStore(redis, keys),
        files=Files(FileStore(redis, keys), folder, section.file_expiry_s, time.time, limits) if folder else None,
        lease=OwnerLease(redis, keys.batch_owner, LEASE_S),
        wakeups=Wakeups(redis, keys.batches_channel),
        memory=MemoryWatch(redis),
    )
