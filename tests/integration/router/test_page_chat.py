"""The page's chat: through the admin port to the API's, with the API's whole answer; cancelled when the page leaves."""

from __future__ import annotations

from typing import Any

import httpx
import orjson
import pytest

from tandem.core.config import Anonymous
from tandem.router.admin.page.chat import API_KEY_HEADER, CHAT_PATH, MAX_CHAT_BYTES
from tests.integration.router.house import ADMIN_KEY, Build, RouterHarness
from tests.integration.router.scripted_worker import Script
from tools.waiting import wait_for

KEY = {"authorization": f"Bearer {ADMIN_KEY}"}
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0}


def chat(house: RouterHarness, headers: dict[str, str] | None = None, **more: Any) -> httpx.Response:
    return httpx.post(f"{house.admin_url}{CHAT_PATH}", headers=KEY | (headers or {}), json=BODY | more, timeout=15)


def test_the_answer_is_the_api_s(shared: RouterHarness) -> None:
    whole = chat(shared)
    direct = httpx.post(f"{shared.url}/v1/chat/completions", json=BODY, timeout=15)
    assert whole.status_code == 200
    assert whole.json()["choices"] == direct.json()["choices"]
    streamed = chat(shared, stream=True)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    chunks = [orjson.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])
    assert text == direct.json()["choices"][0]["message"]["content"]
    assert streamed.text.rstrip().endswith("data: [DONE]")
    url = f"{shared.admin_url}/admin/v1/requests/{chunks[0]['id']}"
    assert httpx.get(url, headers=KEY).json()["spans"], "its waterfall is found by the id of the answer"


def test_what_the_api_refuses_is_passed_on(shared: RouterHarness) -> None:
    answer = chat(shared, model="another")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert chat(shared, max_tokens=-1).status_code == 400


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer wrong"}])
def test_nobody_chats_without_a_key(shared: RouterHarness, headers: dict[str, str]) -> None:
    answer = httpx.post(f"{shared.admin_url}{CHAT_PATH}", headers=headers, json=BODY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")


def test_the_admin_s_key_opens_no_api_that_wants_one_of_its_own(build: Build) -> None:
    house = build(anonymous=Anonymous.NEVER)
    house.wait_ready()
    assert chat(house).json()["error"]["message"].startswith("no API key was given")
    made = httpx.post(f"{house.admin_url}/admin/v1/keys", headers=KEY, json={"tenant": "t"}).json()
    assert chat(house, {API_KEY_HEADER: made["key"]}).status_code == 200
    assert chat(house, {API_KEY_HEADER: "tdk-wrong"}).status_code == 401
    assert chat(house, {API_KEY_HEADER: "a\tb"}).status_code == 400


def test_a_page_that_leaves_cancels_its_request(build: Build) -> None:
    house = build(script=Script(step_s=0.02))
    house.wait_ready()
    body = BODY | {"max_tokens": 3000, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{house.admin_url}{CHAT_PATH}", headers=KEY, json=body, timeout=15) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        assert len(house.router.dispatcher.flights) == 1
    wait_for(lambda: not house.router.dispatcher.flights)
    wait_for(lambda: house.workers["decode-0"].cancels)


def test_too_much_is_refused_and_an_api_that_is_not_there_is_said(build: Build) -> None:
    house = build()
    long = chat(house, messages=[{"role": "user", "content": "x" * MAX_CHAT_BYTES}])
    assert (long.status_code, long.json()["error"]["code"]) == (413, "request_too_large")
    house.router._ports["http"] = 1
    answer = chat(house)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
