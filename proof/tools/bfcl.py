"""Functions of the Berkeley Function Calling Leaderboard, offered as tools: each is accepted, or refused by the place
of what cannot be enforced.

They come as they are written, with types that JSON Schema lacks ("dict", "float", "tuple", "any"), and as the harness
of the leaderboard sends them. Names have dots, which OpenAI's API forbids: the harness writes "_" for them.
"""

from __future__ import annotations

import copy
import json
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from proof.record import Record
from tests.integration.router.house import builder
from tests.integration.router.scripted_worker import Script
from tests.integration.router.tool_models import Said, tool_model

CASES = (
    ("hermes", "as written", "auto"), ("hermes", "as written", "required"), ("hermes", "as sent", "auto"),
    ("hermes", "as sent", "strict"), ("hermes", "as sent", "required"), ("pythonic", "as sent", "required"),
    ("qwen3_coder", "as sent", "required"), ("function_gemma", "as sent", "required"),
)  # fmt: skip
"""Format of calls, spelling of functions, and tool_choice: a format for each style in which arguments are written."""
TYPES = {
    "integer": "integer", "byte": "integer", "short": "integer", "long": "integer", "Bigint": "integer",
    "number": "number", "float": "number", "double": "number", "boolean": "boolean", "bool": "boolean",
    "array": "array", "list": "array", "tuple": "array", "ArrayList": "array", "Array": "array", "Queue": "array",
    "Stack": "array", "dict": "object", "object": "object", "HashMap": "object", "Hashtable": "object",
}  # fmt: skip
"""The harness's table, but for texts, which all others are."""


def check_functions(record: Record, source: Path, end_s: float) -> int:
    """Ask a router for an answer with each function as its tool. Returns how many cases are left when the time is
    over."""
    found: dict[str, Any] = record.content.setdefault("bfcl", {})
    todo = [case for case in CASES if found.get(", ".join(case), {"broken": 1}).get("broken")]
    functions = list(unique(read(source))) if todo else []
    for place, case in enumerate(todo):
        if time.monotonic() > end_s:
            return len(todo) - place
        name = ", ".join(case)
        with asking(case[0]) as client:
            given = functions if case[1] == "as written" else [as_sent(one) for one in functions]
            found[name] = outcome(client, given, case[2])
        record.save()
        print(f"bfcl {name}: {json.dumps(found[name])[:300]}", flush=True)
    return 0


@contextmanager
def asking(form: str) -> Iterator[httpx.Client]:
    """A client of a router with a model that writes calls in a format."""
    with tempfile.TemporaryDirectory() as folder, builder(Path(folder)) as make:
        model = tool_model(Path(folder), form)
        house = make(models=(model,), script=Script(answer=Said(model).answer))
        house.wait_ready()
        with httpx.Client(base_url=house.url, timeout=30) as client:
            yield client


def read(source: Path) -> Iterator[dict[str, Any]]:
    """All functions of the data in a wheel or a folder."""
    if source.is_dir():
        texts = [file.read_text() for file in sorted(source.rglob("*.json")) if _has_functions(str(file))]
    else:
        with zipfile.ZipFile(source) as wheel:
            texts = [wheel.read(name).decode() for name in sorted(wheel.namelist()) if _has_functions(name)]
    for text in texts:
        try:
            documents = json.loads(text)
        except ValueError:
            documents = [json.loads(line) for line in text.splitlines() if line.strip()]
        for one in documents if isinstance(documents, list) else [documents]:
            if isinstance(one, dict):
                yield from one.get("function") or ([one] if "parameters" in one else [])


def _has_functions(name: str) -> bool:
    is_data = name.endswith(".json") and ("/BFCL_v" in name or "/multi_turn_func_doc/" in name)
    return is_data and "possible_answer" not in name and "unused" not in name


def unique(functions: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Each function once, with a name as OpenAI allows it, and without the schema of its result."""
    known = set()
    for function in functions:
        name = function["name"].replace(".", "_")
        one = {"name": name, "description": function["description"], "parameters": function["parameters"]}
        text = json.dumps(one, sort_keys=True)
        if text not in known:
            known.add(text)
            yield one


def as_sent(function: Mapping[str, Any]) -> dict[str, Any]:
    """The function with types of JSON Schema, as the harness casts them."""
    parameters = copy.deepcopy(function["parameters"])
    return {**function, "parameters": {**parameters, "type": "object", "properties": _cast(parameters["properties"])}}


def _cast(properties: dict[str, Any]) -> dict[str, Any]:
    for value in properties.values():
        if value.get("type") == "float":
            value["format"] = "float"
            value["description"] = value.get("description", "") + " This is a float type value."
        value["type"] = TYPES.get(value.get("type", "string"), "string")
        if value["type"] in ("array", "object"):
            _cast_inside(value)
    return properties


def _cast_inside(value: dict[str, Any]) -> None:
    if "properties" in value:
        value["properties"] = _cast(value["properties"])
    elif "items" in value:
        items = value["items"]
        items["type"] = TYPES.get(items["type"], "string")
        if items["type"] == "array" and "items" in items:
            items["items"]["type"] = TYPES.get(items["items"]["type"], "string")
        elif items["type"] == "object" and "properties" in items:
            items["properties"] = _cast(items["properties"])


def outcome(client: httpx.Client, functions: Sequence[Mapping[str, Any]], choice: str) -> dict[str, Any]:
    """Counts of functions that are accepted, and of reasons for the others; `broken`: an answer that is neither."""
    accepted, refused = 0, Counter[str]()
    for function in functions:
        tool = {"type": "function", "function": {**function, "strict": choice == "strict"}}
        body = {
            "model": "tools", "messages": [{"role": "user", "content": "Call."}], "tools": [tool], "max_tokens": 1,
            "tool_choice": "required" if choice == "required" else "auto",
        }  # fmt: skip
        answer = client.post("/v1/chat/completions", json=body)
        accepted += answer.status_code == 200
        if answer.status_code == 200:
            continue
        error = answer.json()["error"]
        place = str(error.get("param"))
        if answer.status_code != 400 or not place.startswith("tools[0].function."):
            return {"broken": f"{answer.status_code} for {json.dumps(function)[:300]}: {answer.text[:300]}"}
        refused[reason(place, error["message"])] += 1
    return {"functions": len(functions), "accepted": accepted, "refused": dict(refused.most_common())}


def reason(place: str, message: str) -> str:
    """An error without what belongs to one function alone."""
    return f"{place.rpartition('.')[2]}: {message.replace(place, '').strip()[:120]}"
