"""A short slice of `make proof NAME=api`: schemathesis against a router with scripted workers."""

from pathlib import Path

import httpx
import pytest

from proof.api.schemathesis_run import run
from tandem.core.config import StoreSection
from tandem.statestore.embedded_redis import PrivateRedis
from tests.integration.router.house import RouterHarness, builder

_TEXT, _STORED = "/v1/completions|/tokenize|/detokenize", "/v1/responses|/v1/files|/v1/batches"
PARTS = {
    "chat": "^/v1/chat",
    "completions": f"^({_TEXT})",
    "responses": f"^({_STORED})",
    "messages": f"^(?!/v1/chat|{_TEXT}|{_STORED})",
}
"""Paths of a part, which is named for its API that answers prompts. Every path is in one part."""


@pytest.mark.timeout(600)
@pytest.mark.drawn(1)
@pytest.mark.parametrize("api", PARTS)
def test_schemathesis_finds_nothing(api: str, tmp_path: Path, redis: PrivateRedis) -> None:
    with builder(tmp_path) as make:
        house = make(start=False, redis_url=redis.url, store=StoreSection(dir=str(tmp_path / "files")))
        for worker in house.workers.values():
            worker.max_model_len = 96  # answers without a limit are short
            worker.script.step_s = 0.0
        house.start()
        house.wait_ready()
        options = ("--phases", "examples,coverage,fuzzing", "--max-examples", "20", "--include-path-regex", PARTS[api])
        outcome = run(house.url, *options, seed=1, timeout_s=550)
        assert outcome.passed, outcome.report
        assert outcome.cases > 100
        outcomes = {
            kind: house.metric(f'tandem_requests_total{{api="{api}",outcome="{kind}"}}')
            for kind in ("invalid_request", "ok", "internal")
        }
        assert outcomes["invalid_request"] > 0
        assert outcomes["ok"] > 0, "what is right gets through, too"
        assert outcomes["internal"] == 0


def test_the_document_is_served(shared: RouterHarness) -> None:
    document = httpx.get(f"{shared.url}/openapi.json").json()
    assert document["info"]["title"] == "Tandem"
    assert document["components"]["schemas"]["ChatRequest"]["properties"]["model"]["enum"] == ["tandem-tiny", "tiny"]
