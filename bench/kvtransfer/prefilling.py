"""A prefill worker reduced to the parts that a hand-over's timing depends on, in a process of its own: model, plan,
sender.

    python -m bench.kvtransfer.prefilling '{"transport": "shm", "model": "…", "tokens": 2048, …}'

Chunks, layer groups and the push plan are the product's; scheduling, tickets and messages are left out.
"""

from __future__ import annotations

import json
import queue
import sys
import time
from pathlib import Path
from typing import Any

import torch

from bench.kvtransfer import pools
from bench.kvtransfer.children import serve
from tandem.core.clock import MonotonicClock
from tandem.core.ids import GroupId, Rank, TransferId, WorkerId
from tandem.engine.runner import ModelRunner
from tandem.engine.runner_protocol import SeqSlice, StepBatch
from tandem.kvtransfer.events import SendCompleted
from tandem.kvtransfer.kv_pool_access import HostPool, payload_bytes
from tandem.kvtransfer.sender import TransferSender
from tandem.kvtransfer.ticket import Endpoint, Ticket
from tandem.prefill_worker.push_plan import PushPlan

GROUP = GroupId(0)
PATIENCE_S = 60.0


class PrefillEnd:
    """Computes prompts and pushes their KV, while computing or afterwards."""

    def __init__(self, options: dict[str, Any]) -> None:
        torch.set_num_threads(options["threads"])
        self._tokens, self._chunk = options["tokens"], options["chunk"]
        layers = pools.SMALL_135M.layers
        self._runner = ModelRunner(
            model_dir=Path(options["model"]), max_model_len=self._tokens, num_blocks=pools.num_blocks(pools.SMALL_135M),
            layer_group=-(-len(layers) // options["layer_groups"]),
        )  # fmt: skip
        self._spec = self._runner.layout.groups[0]
        if self._spec != pools.SMALL_135M:
            raise ValueError(f"the model's KV is {self._spec}")
        pool = HostPool(self._spec, 1, self._runner.pool_bytes(0))
        self._blocks = tuple(pools.source(self._spec).blocks(1, self._spec.blocks_for(self._tokens)))
        self._endpoints: tuple[Endpoint, ...] = ()
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._sender = TransferSender(
            worker=WorkerId("p"), incarnation=pools.SENDER, rank=Rank(0), pools={GROUP: pool}, secret=pools.SECRET,
            on_event=self._events.put, clock=MonotonicClock(), preference=options["transport"],
        )  # fmt: skip

    def connect(self, endpoints: list[dict[str, Any]]) -> dict[str, Any]:
        self._endpoints = tuple(Endpoint(**fields) for fields in endpoints)
        return {}

    def overlapped(self, number: int, is_pushed: bool = True) -> dict[str, Any]:
        """Compute a prompt and push its layers as they come; returns when the last layer was computed (monotonic)."""
        ticket = self._ticket(number)
        plan = PushPlan(self._spec, self._tokens, 0)
        plan.open(0, self._spec.block_tokens)
        late_bytes, computed_s = 0, 0.0
        if is_pushed:
            self._sender.open(ticket)
        started_s = time.monotonic()
        for start in range(0, self._tokens, self._chunk):
            end = min(start + self._chunk, self._tokens)

            def on_layers(first: int, last: int, end: int = end) -> None:
                nonlocal late_bytes, computed_s
                computed_s = time.monotonic()
                plan.computed(first, last, end)
                late_bytes = self._push(ticket, plan) if is_pushed else 0

            self._runner.forward(self._batch(start, end), on_layers)
        sampled_s = time.monotonic()
        if is_pushed:
            self._sender.finish(ticket.transfer)
            self._await_sent(number)
        return {"started_s": started_s, "computed_s": computed_s, "sampled_s": sampled_s, "late_bytes": late_bytes}

    def afterwards(self, number: int) -> dict[str, Any]:
        """Push the whole prompt from the pool, with nothing else running; returns when that began."""
        ticket = self._ticket(number)
        plan = PushPlan(self._spec, self._tokens, 0)
        plan.open(0, self._spec.block_tokens)
        plan.computed(0, len(self._spec.layers), self._tokens)
        self._sender.open(ticket)
        started_s = time.monotonic()
        moved = self._push(ticket, plan)
        self._sender.finish(ticket.transfer)
        self._await_sent(number)
        return {"started_s": started_s, "bytes": moved}

    def close(self) -> None:
        self._sender.close()

    def _push(self, ticket: Ticket, plan: PushPlan) -> int:
        """Push the part that the plan releases; returns its bytes."""
        moved = 0
        for push in plan.take():
            ours, offset_tokens, tokens = plan.source(push)
            layers = range(push.first_layer, push.last_layer)
            targets = ticket.groups[0].blocks[push.first : push.last]
            self._sender.push(ticket.transfer, GROUP, self._blocks[ours], targets, layers, offset_tokens, tokens)
            moved += payload_bytes(self._spec, len(targets), layers, range(self._spec.heads))
        return moved

    def _ticket(self, number: int) -> Ticket:
        blocks = pools.target(self._spec).blocks(number, len(self._blocks))
        return pools.ticket(number, blocks, self._endpoints, self._spec)

    def _batch(self, start: int, end: int) -> StepBatch:
        ids = [(7 * place) % self._runner.vocab_size for place in range(start, end)]
        last = [end - start - 1] if end == self._tokens else []
        return StepBatch(ids, list(range(start, end)), [SeqSlice(end - start, end, (self._blocks,))], last)

    def _await_sent(self, number: int) -> None:
        event = self._events.get(timeout=PATIENCE_S)
        if not isinstance(event, SendCompleted) or event.transfer != TransferId(number):
            raise RuntimeError(f"transfer {number} ended as {event}")


def main() -> None:
    end = PrefillEnd(json.loads(sys.argv[1]))
    print("{}", flush=True)
    try:
        serve({"connect": end.connect, "overlapped": end.overlapped, "afterwards": end.afterwards})
    finally:
        end.close()


if __name__ == "__main__":
    main()
