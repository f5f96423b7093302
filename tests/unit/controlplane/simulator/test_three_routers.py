"""Three routers on virtual time hit as often as one, also where all clients ask for a new prefix at once."""

from __future__ import annotations

import random
from itertools import count

import pytest

from tandem.controlplane.simulator.calibration import Calibration
from tandem.controlplane.simulator.setup import Setup
from tandem.controlplane.simulator.simulated_router import SimulatedRouter
from tandem.controlplane.simulator.simulator import Simulator
from tandem.controlplane.simulator.traces import RequestLog, TraceRequest
from tandem.core.config import Disaggregation, PolicyName
from tandem.router.routing.policies import create_policy

ALLOWED = 0.02
SEEDS = range(2)


def bursts(seed: int, requests: int = 200) -> RequestLog:
    """Agents that ask several times at once, within 50 ms, behind a prefix that is new."""
    dice, blocks, at_s = random.Random(seed), count(1), 0.0
    made: list[TraceRequest] = []
    while len(made) < requests:
        at_s += dice.expovariate(1.2)
        shared = [next(blocks) for _ in range(1 + int(dice.expovariate(1 / 8)))]
        for _ in range(dice.randrange(2, 12)):
            own = 1 + int(dice.expovariate(1 / 512))
            made.append(
                TraceRequest(
                    arrival_s=at_s + dice.uniform(0, 0.05),
                    prompt_tokens=512 * len(shared) + own,
                    output_tokens=1 + int(dice.expovariate(1 / 100)),
                    blocks=(*shared, *(next(blocks) for _ in range(-(-own // 512)))),
                )
            )
    return RequestLog(name=f"bursts-{seed}", requests=tuple(sorted(made, key=lambda request: request.arrival_s)))


def hit_rate(trace: RequestLog, routers: int) -> float:
    policy = create_policy(PolicyName.COST, Disaggregation.AUTO)
    calibration = Calibration(kv_tokens=65_536)
    records = Simulator(Setup(policy=policy, prefill=4, decode=4, calibration=calibration, routers=routers), trace)
    outcome = records.run().records
    return sum(record.cached_tokens for record in outcome) / sum(record.prompt_tokens for record in outcome)


def rates(routers: int) -> float:
    return sum(hit_rate(bursts(seed), routers) for seed in SEEDS) / len(SEEDS)


def test_bursts_stay_together_whichever_router_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    one, three = rates(1), rates(3)
    print(f"hit rate {one:.4f} with one router, {three:.4f} with three")
    assert one > 0.5
    assert three >= one * (1 - ALLOWED)
    monkeypatch.setattr(SimulatedRouter, "others", property(lambda self: (), lambda self, others: None))
    silent = rates(3)
    print(f"{silent:.4f} if they did not tell each other")
    assert silent < three * 0.95
