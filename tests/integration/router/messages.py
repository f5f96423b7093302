"""Parts of requests to /v1/messages, and the shape of its errors."""

from typing import Any

import httpx

HELLO: Any = {"role": "user", "content": "Say something."}


def assert_error(answer: httpx.Response, status: int, kind: str | None = None) -> None:
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"type", "error", "request_id"}
    assert (body["type"], set(body["error"])) == ("error", {"type", "message"})
    assert kind in (None, body["error"]["type"])
    assert body["error"]["message"]
    assert answer.headers["request-id"] == body["request_id"]
    assert answer.headers["content-type"] == "application/json"
