"""One real worker (host and ranks) and the router's side of its stream."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import grpc.aio

from tandem.core.call_proof import STREAM, CallProof, stream_target
from tandem.core.secret import ClusterSecret
from tandem.router.workers import proto_convert as router_wire
from tandem.rpc.v1 import worker_pb2 as w
from tandem.rpc.v1 import worker_pb2_grpc
from tests.integration.worker.pair import END, RunningWorker
from tools.running_cluster import is_alive

PING_EVERY_S = 0.5
LAPSE_S = 2.5
"""A router gives up a worker without a message for so long."""
AUDIT_TIMEOUT_S = 2.0


class Partner:
    """`on_message(partner, message)` is called in the event loop. `lost_s`: when the router knew of its loss, if so."""

    def __init__(self, running: RunningWorker, tp: int, on_message: Callable[[Partner, w.WorkerMessage], None]) -> None:
        self.name, self.ref, self.tp = running.name, running.ref, tp
        self.process = running.process
        self.pids = [running.process.pid, *map(int, running.ready["rank_pids"])]
        self.lost_s: float | None = None
        self.load = w.LoadReport()
        self._on_message = on_message
        self._heard_s = time.monotonic()
        self._writing = asyncio.Lock()
        self._audits: dict[int, asyncio.Future[w.AuditReport]] = {}
        self._number = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self, secret: ClusterSecret) -> None:
        self._channel: Any = grpc.aio.insecure_channel(self.ref.address)
        stub: Any = worker_pb2_grpc.WorkerStub(self._channel)
        self._call: Any = stub.Stream(
            metadata=CallProof.of(secret, STREAM, stream_target(self.ref.worker, self.ref.incarnation)).metadata
        )
        await self.send(hello=router_wire.hello("proof", 1, self.ref.incarnation).hello)
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._ping())]

    async def send(self, **kind: Any) -> None:
        """Send a message, if that is still possible."""
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError, asyncio.CancelledError):
            async with self._writing:
                await asyncio.wait_for(self._call.write(w.RouterMessage(**kind)), 1.0)

    async def audit(self) -> w.AuditReport | None:
        """The worker's audit report; None if it does not answer."""
        self._number += 1
        answer = self._audits[self._number] = asyncio.get_running_loop().create_future()
        await self.send(audit=w.AuditRequest(id=self._number))
        try:
            return await asyncio.wait_for(answer, AUDIT_TIMEOUT_S)
        except TimeoutError:
            return None

    async def at_baseline(self, within_s: float) -> tuple[float | None, str]:
        """(when nothing was held any more, else what is still held)."""
        deadline_s = time.monotonic() + within_s
        while True:
            report = await self.audit()
            held = holding(report)
            if not held:
                return time.monotonic(), ""
            if time.monotonic() > deadline_s:
                return None, held
            await asyncio.sleep(0.02)  # poll interval

    async def end(self, *, is_gentle: bool = True) -> list[int]:
        """Stop it; returns the pids that are still alive 5 s after its host ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._tasks:
            self._call.cancel()
            await self._channel.close()
        if self.process.returncode is None:
            for pid in self.pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            if is_gentle:
                self.process.terminate()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self.process.wait(), 10)
            if self.process.returncode is None:
                self.process.kill()
                await self.process.wait()
        self.process._transport.close()  # type: ignore[attr-defined]
        return await _left(self.pids)

    async def _read(self) -> None:
        while True:
            try:
                message = await self._call.read()
            except (grpc.aio.AioRpcError, asyncio.CancelledError):
                message = END
            self._heard_s = time.monotonic()
            if message is END:
                self.lost_s = self.lost_s or time.monotonic()
                return
            for one in router_wire.each(message):
                self._hear(one)

    def _hear(self, message: w.WorkerMessage) -> None:
        if message.HasField("load"):
            self.load = message.load
        elif message.HasField("audit"):
            answer = self._audits.pop(message.audit.id, None)
            if answer is not None and not answer.done():
                answer.set_result(message.audit)
        elif not message.HasField("pong") and not message.HasField("hello"):
            self._on_message(self, message)

    async def _ping(self) -> None:
        sequence = 0
        while self.lost_s is None:
            sequence += 1
            pinging: Awaitable[None] = self.send(ping=w.Ping(sequence=sequence))
            await pinging
            silent_s = time.monotonic() - self._heard_s
            if silent_s >= LAPSE_S:
                self.lost_s = time.monotonic()
                return
            await asyncio.sleep(min(PING_EVERY_S, LAPSE_S - silent_s))


def holding(report: w.AuditReport | None) -> str:
    """A worker's holds beyond free and cached blocks; "" = none."""
    if report is None:
        return "it does not answer"
    held = [f"{hold.kind} {hold.key}: {len(hold.blocks)} blocks" for hold in report.holds]
    held += [f"sending {t.transfer} ({t.phase})" for t in report.sending]
    held += [f"receiving {t.transfer} ({t.phase})" for t in report.receiving]
    held += [f"{claim.kind} {claim.key}" for claim in report.claims]
    held += [f"request {request.key}" for request in report.requests]
    return "; ".join(held)


async def _left(pids: list[int]) -> list[int]:
    deadline_s = time.monotonic() + 5.0
    while left := [pid for pid in pids if is_alive(pid)]:
        if time.monotonic() > deadline_s:
            return left
        await asyncio.sleep(0.05)
    return []
