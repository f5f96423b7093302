"""Budgets of tenants over both APIs, with a real Redis between two routers, and without one."""

from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest

from tandem.core.config import BudgetSection
from tandem.rpc.v1 import inference_pb2 as i
from tandem.rpc.v1 import inference_pb2_grpc as i_grpc
from tandem.statestore.embedded_redis import PrivateRedis
from tests.integration.router.house import Build, RouterHarness, builder

FIVE = {"anonymous": BudgetSection(requests_per_minute=30)}
"""Five at once, and another every two seconds."""
ONE = {"anonymous": BudgetSection(requests_per_minute=3)}
"""One at once, and another every twenty seconds: a refused client is refused for some time."""


def post(house: RouterHarness, **more: Any) -> httpx.Response:
    body = {"model": "tiny", "prompt": "Hi", "max_tokens": 2, **more}
    return httpx.post(f"{house.url}/v1/completions", json=body, timeout=30)


def spend(house: RouterHarness, most: int = 20) -> int:
    """Return the number of requests served before one was refused."""
    for count in range(most):
        if post(house).status_code != 200:
            return count
    return most


def test_a_spent_budget_says_when_to_come_back_on_both_doors(build: Build) -> None:
    house = build(budget=ONE)
    house.wait_ready()
    assert spend(house) in (1, 2)
    answer = post(house)
    assert answer.status_code == 429
    error = answer.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("rate_limit_error", "rate_limit_exceeded", None)
    assert "3 requests a minute" in error["message"]
    assert 1 <= int(answer.headers["retry-after"]) <= 20
    assert 0 < int(answer.headers["retry-after-ms"]) <= 20_000
    assert answer.headers["x-should-retry"] == "true"
    client = openai.OpenAI(base_url=f"{house.url}/v1", api_key="none", max_retries=0, timeout=20)
    with pytest.raises(openai.RateLimitError):
        client.completions.create(model="tiny", prompt="Hi", max_tokens=2)
    with grpc.insecure_channel(f"127.0.0.1:{house.ports['grpc']}") as channel, pytest.raises(grpc.RpcError) as caught:
        list(i_grpc.InferenceStub(channel).Generate(i.GenerateRequest(model="tiny", text="Hi")))
    failure: Any = caught.value
    assert failure.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert dict(failure.trailing_metadata())["tandem-code"] == "rate_limit_exceeded"
    assert house.metric('tandem_admission_refused_total{reason="budget"}') >= 4


def test_tokens_count_as_they_were_used(build: Build) -> None:
    """An answer that ends early costs what it has, not what it might have had."""
    house = build(budget={"*": BudgetSection(tokens_per_minute=600)})
    house.wait_ready()
    assert post(house, max_tokens=90).status_code == 200  # leaves about ten of a hundred
    assert post(house, max_tokens=100).status_code == 200  # leaves a debt
    assert post(house).status_code == 429


def test_who_is_refused_later_has_spent_nothing(build: Build) -> None:
    house = build(prefill=0, decode=0, budget=FIVE)
    for _ in range(8):
        assert post(house).status_code == 503
        house.call(house.router.frontend.response_factory.budgets.flush())


def test_two_routers_share_a_budget(redis: PrivateRedis, tmp_path: Path) -> None:
    with builder(tmp_path) as make:
        houses = [make(redis_url=redis.url, cluster="shared-budget", budget=FIVE) for _ in range(2)]
        for house in houses:
            house.wait_ready()
        assert spend(houses[0]) in (5, 6, 7)
        assert post(houses[1]).status_code == 429
