"""Test the page through a real admin port, and its chat."""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import httpx
import orjson
import pytest

from tandem.core.config import Anonymous
from tandem.router.admin.page.chat import API_KEY_HEADER, CHAT_PATH, MAX_CHAT_BYTES
from tandem.router.admin.page.static_files import HEADERS, STATIC
from tests.integration.router.house import ADMIN_KEY, Build, RouterHarness
from tests.integration.router.scripted_worker import Script
from tools.waiting import wait_for

KEY = {"authorization": f"Bearer {ADMIN_KEY}"}
FILES = sorted(path.name for path in STATIC.iterdir())


@contextlib.contextmanager
def watching(house: RouterHarness, **headers: str) -> Iterator[Iterator[tuple[str, Any]]]:
    """Yield (section, its content) as they come."""
    with httpx.stream("GET", f"{house.admin_url}/admin/v1/live", headers=KEY | headers, timeout=20) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")

        def said() -> Iterator[tuple[str, Any]]:
            name = ""
            for line in answer.iter_lines():
                field, _, value = line.partition(": ")
                if field == "event":
                    name = value
                elif field == "data":
                    yield name, orjson.loads(value)

        yield said()


def test_the_page_is_there_without_a_key_and_says_nothing(shared: RouterHarness) -> None:
    aside = httpx.get(f"{shared.admin_url}/ui")
    assert (aside.status_code, aside.headers["location"]) == (307, "ui/")
    page = httpx.get(f"{shared.admin_url}/ui/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.content == (STATIC / "index.html").read_bytes()
    assert httpx.post(f"{shared.admin_url}/ui/").status_code in (404, 405)
    for name in ("../static_files.py", "..%2fstatic_files.py", "nothing.js", "static_files.py"):
        assert httpx.get(f"{shared.admin_url}/ui/{name}").status_code == 404, name


@pytest.mark.parametrize("name", ["", "no such file", *FILES])
def test_browsers_are_told_to_be_strict(shared: RouterHarness, name: str) -> None:
    answer = httpx.get(f"{shared.admin_url}/ui/{name}")
    assert {key: answer.headers[key] for key in HEADERS} == HEADERS
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert {policy[f"{kind}-src"] for kind in ("script", "style", "img", "connect")} == {"'self'"}
    assert "unsafe" not in answer.headers["content-security-policy"]


def test_a_file_that_is_known_is_not_sent_again(shared: RouterHarness) -> None:
    url = f"{shared.admin_url}/ui/main.js"
    tag = httpx.get(url).headers["etag"]
    again = httpx.get(url, headers={"if-none-match": tag})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("name", FILES)
def test_files_need_nothing_from_elsewhere_and_nothing_inline(name: str) -> None:
    text = (STATIC / name).read_text()
    assert set(re.findall(r"\bhttps?://[^\"'\s]+", text)) <= {"http://www.w3.org/2000/svg"}
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text)
    if name.endswith(".html"):
        assert not re.findall(r"\son\w+=|\sstyle=|<style|javascript:", text)
        assert re.findall(r"<script[^>]*>", text) == ['<script type="module" src="main.js">']
        assert set(re.findall(r'(?:src|href)="([^"#]+)"', text)) <= set(FILES)
    if name.endswith(".js"):
        assert {path.removeprefix("./") for path in re.findall(r'from "([^"]+)"', text)} <= set(FILES)


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer wrong"}, {"cookie": f"key={ADMIN_KEY}"}])
def test_nobody_looks_without_a_key(shared: RouterHarness, headers: dict[str, str]) -> None:
    for query in ("", f"?key={ADMIN_KEY}", f"?authorization=Bearer%20{ADMIN_KEY}"):
        answer = httpx.get(f"{shared.admin_url}/admin/v1/live{query}", headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")


def test_an_api_key_looks_if_it_may(build: Build) -> None:
    house = build()
    statuses = []
    for scopes in (["admin"], ["infer"]):
        made = httpx.post(f"{house.admin_url}/admin/v1/keys", headers=KEY, json={"tenant": "t", "scopes": scopes})
        headers = {"authorization": f"Bearer {made.json()['key']}"}
        with httpx.stream("GET", f"{house.admin_url}/admin/v1/live", headers=headers) as answer:
            statuses.append(answer.status_code)
    assert statuses == [200, 403]


def test_a_change_without_a_key_is_refused(shared: RouterHarness) -> None:
    for path in ("desired/propose", "desired"):
        answer = httpx.post(f"{shared.admin_url}/admin/v1/{path}", json={"wish": {}})
        assert answer.status_code == 401, path


def test_the_stream_says_what_there_is_and_that_a_worker_died(build: Build) -> None:
    house = build(prefill=2, decode=3)
    house.wait_ready()
    with watching(house) as said:
        first = {}
        for name, value in said:
            first[name] = value
            if len(first) == 7:
                break
        assert {row["worker"]: (row["role"], row["state"]) for row in first["status"]["workers"]} == {
            **{f"prefill-{number}": ("prefill", "ready") for number in range(2)},
            **{f"decode-{number}": ("decode", "ready") for number in range(3)},
        }
        assert first["desired"] == {"error": "this cluster has no desired state: no controller has written one "
                                             "yet. Try again."}  # fmt: skip
        assert first["plan"] == {"mode": "off", "plan": None}
        house.kill_worker("decode-1")
        for name, value in said:
            if name == "status":
                states = {row["worker"]: row["state"] for row in value["workers"]}
                if states["decode-1"] != "ready":
                    break
        assert states["decode-1"] == "unreachable"
        assert {state for worker, state in states.items() if worker != "decode-1"} == {"ready"}


def test_a_viewer_that_leaves_is_forgotten_and_a_router_that_stops_ends_the_stream(build: Build) -> None:
    house = build()
    with watching(house) as said:
        next(said)
        assert house.router.live.viewers == 1
    wait_for(lambda: house.router.live.viewers == 0)
    with watching(house) as said:
        next(said)
        house.loop.call_soon_threadsafe(house.router.stop)
        for _ in said:
            continue
    house.stop()


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
