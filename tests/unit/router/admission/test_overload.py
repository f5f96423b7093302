"""Overload on virtual time: a worker that computes one prompt after the other, behind an admission as routers have."""

import heapq
import random
import statistics
from dataclasses import dataclass, field

from tandem.core.clock import ManualClock
from tandem.core.config import AdmissionSection
from tandem.core.errors import TandemError
from tandem.router.admission.admission_controller import POLL_S, AdmissionController, QueuedRequest
from tandem.router.admission.slo_classes import SloTerms

SERVICE_S, TTFT_S = 0.05, 1.0
CAPACITY = 1 / SERVICE_S
COST = 408


class Nobody:
    def waited(self, seconds: float) -> None:
        return

    def refused(self, reason: str) -> None:
        return


@dataclass
class Tenant:
    """Poisson arrivals; `ttft_s` of those that were served."""

    name: str
    rate: float
    ttft_s: list[float] = field(default_factory=list)
    refused: int = 0


class Shop:
    def __init__(self, rules: AdmissionSection) -> None:
        self.clock, self._rules = ManualClock(), rules
        self.busy_until_s = 0.0
        self.admission = AdmissionController(rules, self.clock, lambda model, need: self._has_room(), Nobody())

    def _has_room(self) -> bool:
        queued_s = self.busy_until_s - self.clock.now_s()
        rules = self._rules
        return queued_s < rules.worker_queue_s or queued_s < (rules.worker_queue_requests - 1) * SERVICE_S

    def arrive(self, tenant: Tenant) -> None:
        at_s = self.clock.now_s()
        terms = SloTerms(tenant=tenant.name, slo="chat", ttft_s=TTFT_S)

        def grant() -> None:
            now_s = self.clock.now_s()
            begins_s = max(now_s, self.busy_until_s)
            self.admission.check_slo(terms, at_s, begins_s + SERVICE_S - now_s, SERVICE_S)
            self.busy_until_s = begins_s + SERVICE_S
            tenant.ttft_s.append(self.busy_until_s - at_s)

        def refuse(error: TandemError) -> None:
            tenant.refused += 1

        request = QueuedRequest(
            terms=terms, prompt_tokens=400, choices=1, cost=COST, arrived_s=at_s, deadline_s=at_s + 600, grant=grant,
            refuse=refuse, compute_time=lambda: SERVICE_S,
        )  # fmt: skip
        try:
            self.admission.enter(request)
        except TandemError as error:
            refuse(error)


def serve(tenants: list[Tenant], seconds: float, rules: AdmissionSection | None = None) -> None:
    shop = Shop(rules or AdmissionSection())
    arrivals: list[tuple[float, int]] = []
    for number, tenant in enumerate(tenants):
        dice, at_s = random.Random(number), 0.0
        while (at_s := at_s + dice.expovariate(tenant.rate)) < seconds:
            arrivals.append((at_s, number))
    heapq.heapify(arrivals)
    while arrivals:
        polled_s = shop.clock.now_s() + POLL_S if shop.admission.waiting else float("inf")
        if arrivals[0][0] < polled_s:
            at_s, number = heapq.heappop(arrivals)
            shop.clock.advance(at_s - shop.clock.now_s())
            shop.arrive(tenants[number])
        else:
            shop.clock.advance(POLL_S)
            shop.admission.pump()


def p99_s(tenant: Tenant) -> float:
    return statistics.quantiles(tenant.ttft_s, n=100)[98]


def test_at_twice_the_capacity_what_is_served_is_served_in_time() -> None:
    tenant = Tenant("one", 2 * CAPACITY)
    serve([tenant], 300.0)
    assert len([s for s in tenant.ttft_s if s <= TTFT_S]) / 300.0 >= 0.9 * CAPACITY
    assert max(tenant.ttft_s) <= TTFT_S
    assert tenant.refused > 0


def test_a_flood_moves_the_p99_of_another_tenant_by_less_than_a_fifth() -> None:
    p99s = []
    for flood in (1, 10):
        modest, greedy = Tenant("modest", CAPACITY / 4), Tenant("greedy", flood * CAPACITY / 2)
        serve([modest, greedy], 600.0)
        p99s.append(p99_s(modest))
        assert modest.refused == 0
        assert max(modest.ttft_s) < TTFT_S / 2
    assert p99s[1] < 1.2 * p99s[0]


def test_who_keeps_to_its_share_is_served_as_promised_beside_one_that_does_not() -> None:
    """Half of the capacity is its share, and nearly all of that it uses."""
    modest, greedy = Tenant("modest", 0.45 * CAPACITY), Tenant("greedy", 5 * CAPACITY)
    serve([modest, greedy], 300.0)
    assert len(modest.ttft_s) >= 0.99 * (len(modest.ttft_s) + modest.refused)
    assert len(modest.ttft_s) + len(greedy.ttft_s) >= 0.97 * 300.0 * CAPACITY
