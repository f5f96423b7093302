"""A router's demand reports to the planner, through a real Redis, and the planner's report on the admin port."""

import asyncio
import contextlib
from typing import Any

import httpx

from tandem.core.config import AdmissionSection, SloSection
from tandem.core.demand import Demand, RouterDemand
from tandem.core.ids import RouterId
from tandem.core.link_speed import LinkSpeed
from tandem.statestore.connection import connect
from tandem.statestore.keys import Keys
from tandem.statestore.stores.planning import PlanningStore
from tests.integration.router.house import ADMIN_KEY, Build, RouterHarness, ask
from tests.integration.router.scripted_worker import KV_TOKEN_BYTES
from tools.waiting import wait_for_async

SLO = {"chat": SloSection(ttft_s=9.0, itl_s=0.5)}


def test_requests_workers_and_promises_are_told(build: Build, redis_url: str) -> None:
    house = build(decode=2, redis_url=redis_url, slo=SLO, admission=AdmissionSection(default_slo="chat"))
    house.wait_ready()
    link = LinkSpeed(from_host="", to_host="", transport="shm", peer="decode-0", bytes_per_s=3e9)
    house.router.table.speeds.set_rows([link])
    body = ask(house, n=2).json()
    assert ask(house, prompt="x" * 100_000).status_code == 400, "too long: nobody's work"

    async def told() -> RouterDemand:
        redis = await connect(redis_url)
        store = PlanningStore(redis, Keys(house.config.cluster))
        telling = asyncio.create_task(house.router.demand.tell(store, RouterId("r1"), 0.01))
        try:
            found: list[RouterDemand] = []

            async def is_over() -> bool:
                found[:] = await store.heard()
                return any(one.has_ended for heard in found for one in heard.demand.asked)

            await wait_for_async(is_over)
            return found[0]
        finally:
            telling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await telling
            await redis.aclose()

    heard: RouterDemand = house.call(told(), 60.0)
    (one,) = heard.demand.asked
    assert (one.prompt_tokens, one.choices, one.slo) == (body["usage"]["prompt_tokens"], 2, "chat")
    assert one.output_tokens * 2 == body["usage"]["completion_tokens"]
    assert heard.demand.promises == SLO
    assert heard.demand.link_bytes_per_s == 3e9
    assert {worker.kv_token_bytes for worker in heard.demand.workers} == {KV_TOKEN_BYTES}
    assert {(worker.worker, worker.role.value, worker.takes_work) for worker in heard.demand.workers} == {
        ("prefill-0", "prefill", True), ("decode-0", "decode", True), ("decode-1", "decode", True),
    }  # fmt: skip
    assert Demand.from_json(heard.demand.to_json()) == heard.demand


def test_the_admin_port_has_the_planners_last_word(build: Build, redis_url: str) -> None:
    house = build(redis_url=redis_url)
    assert planned(house) == {"mode": "off", "plan": None}
    word = {"mode": "act", "reason": "so"}

    async def say() -> None:
        redis = await connect(redis_url)
        await PlanningStore(redis, Keys(house.config.cluster)).say(word, for_s=60.0)
        await redis.aclose()

    asyncio.run(say())
    assert planned(house) == {"mode": "act", "plan": word}


def test_without_a_store_nothing_is_said(build: Build) -> None:
    assert planned(build()) == {"mode": "off", "plan": None}


def planned(house: RouterHarness) -> dict[str, Any]:
    answer = httpx.get(f"{house.admin_url}/admin/v1/plan", headers={"authorization": f"Bearer {ADMIN_KEY}"})
    assert answer.status_code == 200
    return dict(answer.json())
