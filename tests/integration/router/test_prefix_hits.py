"""Expected prefix hits on workers that just got prompts, and the count of the hits really found."""

import concurrent.futures
import json

import httpx
import pytest

from tandem.core import metric_names as names
from tests.integration.router.house import Build, RouterHarness
from tests.integration.router.scripted_worker import Script

PROMPT = [(7 * k) % 3000 + 600 for k in range(100)]
KNOWN = 96


def ask(house: RouterHarness, prompt: list[int], timeout_s: float = 15) -> httpx.Response:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0}
    return httpx.post(f"{house.url}/v1/completions", json=body, timeout=timeout_s, headers={"x-tandem-timing": "1"})


def predicted(answer: httpx.Response) -> int:
    assert answer.status_code == 200, answer.text
    return int(json.loads(answer.headers["x-tandem-timing"])["predicted_cached_tokens"])


def hits(house: RouterHarness) -> tuple[float, float]:
    return house.metric(names.PREFIX_PREDICTED), house.metric(names.PREFIX_ACTUAL)


def mismatches(house: RouterHarness, basis: str, found: str) -> float:
    return house.metric(f'{names.PREFIX_MISMATCHES}{{basis="{basis}",found="{found}"}}')


def test_a_prompt_that_is_being_computed_is_expected_and_counted(build: Build) -> None:
    house = build()
    house.wait_ready()
    prefill = house.workers["prefill-0"]
    prefill.script = Script(prefill_s=0.3)
    before = hits(house)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        first = pool.submit(ask, house, PROMPT)
        house.wait(lambda: bool(prefill.submitted))
        second = pool.submit(ask, house, [*PROMPT, *PROMPT])
        assert predicted(first.result(15)) == 0
        assert predicted(second.result(15)) == KNOWN
    assert hits(house) == (before[0] + KNOWN, before[1])
    assert mismatches(house, "speculation", "less") == 1
    prefill.script = Script(cached_tokens=32)
    assert predicted(ask(house, [5] * 100)) == 0
    assert mismatches(house, "index", "more") == 1
    assert hits(house) == (before[0] + KNOWN, before[1] + 32)


def test_a_prompt_that_failed_or_was_cancelled_is_no_longer_expected(build: Build) -> None:
    house = build(prefill=1)
    house.wait_ready()
    prefill = house.workers["prefill-0"]
    prefill.script = Script(refuse=("invalid_request", "not this one"))
    assert ask(house, PROMPT).status_code == 400
    prefill.script = Script()
    other = [*PROMPT[:48], *[9] * 60]
    assert predicted(ask(house, other)) == 0
    prefill.script = Script(prefill_s=30)
    late = [8] * 100
    with pytest.raises(httpx.ReadTimeout):
        ask(house, late, timeout_s=0.3)
    house.wait(lambda: not house.router.dispatcher.flights)
    prefill.script = Script()
    assert predicted(ask(house, late)) == 0
