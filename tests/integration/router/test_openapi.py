"""A short slice of `make proof NAME=api`: schemathesis against a router with scripted workers."""

from pathlib import Path

import httpx
import pytest

from proof.api.schemathesis_run import run
from tandem.core.config import StoreSection
from tandem.statestore.embedded_redis import PrivateRedis
from tests.integration.router.house import RouterHarness, builder


@pytest.mark.timeout(600)  # two minutes on quiet cores, four beside other tests
def test_schemathesis_finds_nothing(tmp_path: Path, redis: PrivateRedis) -> None:
    with builder(tmp_path) as make:
        house = make(start=False, redis_url=redis.url, store=StoreSection(dir=str(tmp_path / "files")))
        for worker in house.workers.values():
            worker.max_model_len = 96  # answers without a limit are short
            worker.script.step_s = 0.0
        house.start()
        house.wait_ready()
        outcome = run(house.url, "--phases", "examples,coverage,fuzzing", "--max-examples", "20", seed=1, timeout_s=550)
        assert outcome.passed, outcome.report
        assert outcome.cases > 100
        for api in ("chat", "completions", "responses", "messages"):  # what is right got through, too
            assert house.metric(f'tandem_requests_total{{api="{api}",outcome="invalid_request"}}') > 0
            assert house.metric(f'tandem_requests_total{{api="{api}",outcome="ok"}}') > 0
            assert house.metric(f'tandem_requests_total{{api="{api}",outcome="internal"}}') == 0


def test_the_document_is_served(shared: RouterHarness) -> None:
    document = httpx.get(f"{shared.url}/openapi.json").json()
    assert document["info"]["title"] == "Tandem"
    assert document["components"]["schemas"]["ChatRequest"]["properties"]["model"]["enum"] == ["tandem-tiny", "tiny"]
