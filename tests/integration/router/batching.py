"""Repeated steps of batch tests, with the `openai` client."""

import json
from typing import Any

import openai
from openai.types import Batch, FileObject

from tools.waiting import wait_for

Request = dict[str, Any]


def request(custom_id: str, url: str = "/v1/completions", **body: Any) -> Request:
    body = {"model": "tiny", "max_tokens": 3, "temperature": 0, **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def upload(client: openai.OpenAI, *requests: Request, name: str = "in.jsonl") -> FileObject:
    data = "\n".join(json.dumps(one) for one in requests).encode()
    return client.files.create(file=(name, data), purpose="batch")


def start(client: openai.OpenAI, *requests: Request, endpoint: Any = "/v1/completions", **more: Any) -> Batch:
    file = upload(client, *requests)
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **more)


def finish(client: openai.OpenAI, batch: Batch) -> Batch:
    def look() -> Batch | None:
        found = client.batches.retrieve(batch.id)
        Batch.model_validate(found.model_dump(), strict=True)
        return found if found.status in ("completed", "failed", "cancelled", "expired") else None

    over: Batch = wait_for(look)
    return over


def lines(client: openai.OpenAI, file: str | None) -> list[dict[str, Any]]:
    assert file is not None
    return [json.loads(line) for line in client.files.content(file).text.splitlines()]
