"""Roles on virtual time: the prefill worker asks for a ticket and pushes, the decode worker reserves and admits.

The protocol of prefill_worker/role.py and decode_worker/ticket_grants.py without failures: nothing is lost, revoked or
retried here. Quota, reservation, preemption for tickets and admission are the real ledger's and scheduler's.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Protocol

from tandem.controlplane.simulator.events import Action, EventQueue
from tandem.controlplane.simulator.simulated_request import SimulatedRequest
from tandem.controlplane.simulator.worker import VirtualWorker
from tandem.core.ids import WorkerId
from tandem.core.ledger import Holder, HoldKind
from tandem.workercore import peer_block_quota


class Wires:
    """Links of workers, each with one way out and one way in of `bytes_per_s` each; a transfer needs both."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._out_free_s: defaultdict[WorkerId, float] = defaultdict(float)
        self._in_free_s: defaultdict[WorkerId, float] = defaultdict(float)
        self.sent_bytes: defaultdict[tuple[WorkerId, WorkerId], float] = defaultdict(float)

    def send(
        self, sender: WorkerId, receiver: WorkerId, size_bytes: float, *, from_s: float, last_s: float, parts: int = 1
    ) -> float:
        """Return when the last byte is there. The bytes come into being in `parts`, the first of them at `from_s` and
        the last one at `last_s`."""
        took_s = size_bytes / self.bytes_per_s
        out_s = self._out_free_s[sender] = max(self._out_free_s[sender], from_s) + took_s
        in_s = self._in_free_s[receiver] = max(self._in_free_s[receiver], from_s) + took_s
        self.sent_bytes[sender, receiver] += size_bytes
        return max(out_s, in_s, last_s + took_s / parts)


class Client(Protocol):
    """The router's end: notified when something reaches it."""

    def first_token(self, flight: SimulatedRequest) -> None: ...
    def handed_over(self, flight: SimulatedRequest) -> None: ...
    def finished(self, flight: SimulatedRequest) -> None: ...


class SimulatedNetwork:
    """Network between processes: messages take `rpc_s`, bytes the time of the wires."""

    def __init__(self, events: EventQueue, wires: Wires, rpc_s: float, client: Client) -> None:
        self.events, self.wires, self.rpc_s, self.client = events, wires, rpc_s, client
        self.workers: Mapping[WorkerId, VirtualWorker] = {}
        self.decoding: dict[WorkerId, DecodeSide] = {}
        self.prefilling: dict[WorkerId, PrefillSide] = {}

    def tell(self, worker: VirtualWorker, action: Action) -> None:
        """Deliver a message that `worker` reads between two steps."""
        self.events.after(self.rpc_s, partial(worker.post, action))


class WholeSide:
    """Requests that one worker serves alone. The whole of a mixed worker, and a part of both others."""

    def __init__(self, worker: VirtualWorker, net: SimulatedNetwork) -> None:
        self._worker, self._net = worker, net

    def before_step(self) -> None:
        return

    def began(self, flight: SimulatedRequest) -> None:
        raise RuntimeError(f"{self._worker.worker} has no decode worker to hand over to")

    def computed(self, flight: SimulatedRequest, started_s: float) -> None:
        return

    def first_token(self, flight: SimulatedRequest) -> None:
        raise RuntimeError(f"{self._worker.worker} has no decode worker to hand over to")

    def decoded(self, flight: SimulatedRequest) -> None:
        net = self._net
        if flight.first_token_s is None:
            flight.first_token_s = net.events.now_s() + net.rpc_s
            net.events.after(net.rpc_s, partial(net.client.first_token, flight))
        else:
            net.events.after(net.rpc_s, partial(net.client.handed_over, flight))

    def finished(self, flight: SimulatedRequest) -> None:
        self._worker.flights.pop(flight.key, None)
        self._finish(flight)

    def _finish(self, flight: SimulatedRequest) -> None:
        net = self._net
        flight.finished_s = net.events.now_s() + net.rpc_s
        net.events.after(net.rpc_s, partial(net.client.finished, flight))


class PrefillSide(WholeSide):
    """Computes prompts, pushes computed KV, keeps the blocks until the other side has verified them."""

    def began(self, flight: SimulatedRequest) -> None:
        decode = self._net.decoding[flight.decode]
        self._net.tell(decode.worker, partial(decode.ask, flight))

    def granted(self, flight: SimulatedRequest) -> None:
        """Take the ticket. It is read inside a step too, so that pushes overlap with computing."""
        if flight.finished_s is not None:
            return  # it ended with its first token, and the notice to the other side is on its way
        flight.granted_s = self._net.events.now_s()
        self._push(flight, flight.granted_s)
        if flight.first_token_s is not None:
            self._complete(flight)

    def computed(self, flight: SimulatedRequest, started_s: float) -> None:
        if flight.granted_s is not None:
            self._push(flight, max(started_s, flight.granted_s))

    def first_token(self, flight: SimulatedRequest) -> None:
        net = self._net
        flight.first_token_s = net.events.now_s() + net.rpc_s
        net.events.after(net.rpc_s, partial(net.client.first_token, flight))
        if flight.request.output_tokens == 1:
            decode = net.decoding[flight.decode]
            net.tell(decode.worker, partial(decode.not_needed, flight))
            self._release(flight)
            self._finish(flight)
        elif flight.granted_s is not None:
            self._complete(flight)

    def verified(self, flight: SimulatedRequest) -> None:
        """Handle the verification: the decode worker goes on with it."""
        self._release(flight)

    def _push(self, flight: SimulatedRequest, from_s: float) -> None:
        calibration, first = self._worker.calibration, max(flight.pushed_tokens, flight.skipped_tokens)
        tokens = flight.computed_tokens - first
        if tokens <= 0:
            return
        now_s, parts = self._net.events.now_s(), calibration.layer_groups
        arrived_s = self._net.wires.send(
            self._worker.worker, flight.decode, tokens * calibration.kv_token_bytes,
            from_s=from_s + (now_s - from_s) / parts, last_s=now_s, parts=parts if now_s > from_s else 1,
        )  # fmt: skip
        flight.arrived_s = max(flight.arrived_s, arrived_s)
        flight.pushed_tokens = flight.computed_tokens

    def _complete(self, flight: SimulatedRequest) -> None:
        decode, events = self._net.decoding[flight.decode], self._net.events
        ready_s = max(flight.arrived_s, events.now_s() + self._net.rpc_s)
        events.at(ready_s, partial(decode.worker.post, partial(decode.admit, flight)))

    def _release(self, flight: SimulatedRequest) -> None:
        if flight.state is not None:
            self._worker.scheduler.remove(flight.state)
        self._worker.flights.pop(flight.key, None)
        self._worker.done.requests += 1


class DecodeSide(WholeSide):
    """Grants tickets in the order of asking, admits arrived requests, generates."""

    def __init__(self, worker: VirtualWorker, net: SimulatedNetwork) -> None:
        super().__init__(worker, net)
        self.worker = worker
        self._asked: dict[str, SimulatedRequest] = {}
        self._reserved: dict[str, SimulatedRequest] = {}

    def ask(self, flight: SimulatedRequest) -> None:
        """Handle a ticket request: a prefill worker has begun with the prompt and needs blocks here."""
        self._asked[flight.key] = flight

    def not_needed(self, flight: SimulatedRequest) -> None:
        """Handle an answer that ended with its first token."""
        self._asked.pop(flight.key, None)
        if self._reserved.pop(flight.key, None) is not None and flight.holder is not None:
            self.worker.space.release_holder(flight.holder)
        self.worker.flights.pop(flight.key, None)

    def before_step(self) -> None:
        """Grant as Granting.grant_due: freed blocks collect for the oldest that is within its peer's quota."""
        if not self._asked:
            return
        waiting = Counter(flight.prefill for flight in self._asked.values())
        for flight in list(self._asked.values()):
            if waiting.total() > waiting[flight.prefill] and self._is_over_quota(flight):
                continue
            if not self._find_room(flight):
                break
            waiting[flight.prefill] -= 1
            del self._asked[flight.key]
            self._reserved[flight.key] = flight
            self._net.events.after(self._net.rpc_s, partial(self._net.prefilling[flight.prefill].granted, flight))

    def admit(self, flight: SimulatedRequest) -> None:
        """Admit it: every byte and the first token are here."""
        state, worker = self.worker.new_decoding(flight), self.worker
        assert flight.holder is not None
        worker.space.adopt(state, flight.holder, flight.tables)
        worker.scheduler.add_running(state)
        del self._reserved[flight.key]
        flight.admitted_s = self._net.events.now_s()
        prefill = self._net.prefilling[flight.prefill]
        self._net.tell(self._net.workers[flight.prefill], partial(prefill.verified, flight))

    def _is_over_quota(self, flight: SimulatedRequest) -> bool:
        held = sum(len(f.tables[0]) for f in self._reserved.values() if f.prefill == flight.prefill)
        return peer_block_quota.is_over([held], [self._needs(flight)], [self.worker.space.total_blocks()])

    def _needs(self, flight: SimulatedRequest) -> int:
        return self.worker.space.blocks_for(flight.request.prompt_tokens)

    def _find_room(self, flight: SimulatedRequest) -> bool:
        scheduler, arrival_s = self.worker.scheduler, flight.announced_s
        preempted_s = scheduler.oldest_preempted_s
        if scheduler.is_starved or (preempted_s is not None and preempted_s <= arrival_s):
            return False
        if not scheduler.has_turn_for(1, arrival_s, len(self._reserved)):
            return False
        if self._reserve(flight):
            return True
        victims = scheduler.preempt_for(arrival_s, [self._needs(flight)])
        for key in victims:
            self.worker.flights[key].preemptions += 1
        return bool(victims) and self._reserve(flight)

    def _reserve(self, flight: SimulatedRequest) -> bool:
        """Reserve as decode_worker.reservation.reserve."""
        space, holder = self.worker.space, Holder(HoldKind.RESERVED, f"{flight.key}#1/1")
        room = space.reserve(holder, flight.hashes, self._needs(flight), self.worker.scheduler.running_sequences)
        if room is None:
            return False
        flight.holder, flight.tables = holder, tuple(group.blocks for group in room)
        flight.skipped_tokens = room[0].hits * space.block_tokens
        return True
