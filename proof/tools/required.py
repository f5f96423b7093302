"""Calls that SmolLM2 has to make, on a cluster: each names an offered tool, with arguments that its schema allows."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs

from bench.report import ROOT
from proof.record import Record
from tandem.controlplane.model_catalog import SMOLLM2
from tandem.controlplane.model_download import pull
from tools.running_cluster import Cluster, running

TEMPLATE = ROOT / "tests" / "unit" / "router" / "output_formats" / "templates" / "smollm2.jinja"
TOGETHER = 4
MOST_TOKENS = 3072
"""Enough for 16 calls."""
STRING, TEXT = ({"type": "string", "maxLength": most} for most in (60, 300))
"""With bounds: small models go round in circles in a text that has none, until the answer is cut."""
NUMBER, WHOLE, FLAG = ({"type": "number"}, {"type": "integer", "minimum": 0, "maximum": 1000}, {"type": "boolean"})
STRINGS = {"type": "array", "items": STRING, "maxItems": 4}


def _tool(name: str, description: str, properties: Mapping[str, Any], required: Sequence[str] = ()) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = [
    _tool("get_weather", "The forecast of a town.", {
        "city": STRING, "days": WHOLE, "units": {"enum": ["C", "F"]}}, ["city"]),
    _tool("search_web", "Searches the web.", {
        "query": STRING, "most": {**WHOLE, "minimum": 1, "maximum": 50}}, ["query"]),
    _tool("send_mail", "Sends a mail.", {
        "to": STRINGS, "subject": STRING, "body": TEXT, "is_urgent": FLAG}, ["to", "body"]),
    _tool("now", "The time.", {}),
    _tool("calculate", "Calculates a term.", {"term": STRING}, ["term"]),
    _tool("add_event", "Adds an event to the calendar.", {
        "title": STRING, "day": {"type": "string", "format": "date"}, "guests": {
            "type": "array", "maxItems": 4, "items": {
                "type": "object", "properties": {"name": STRING, "mail": STRING}, "required": ["name"]},
        },
    }, ["title", "day"]),
    _tool("convert_money", "Converts an amount.", {"amount": NUMBER, "from": {"enum": ["EUR", "USD", "CHF"]}, "to": {
        "enum": ["EUR", "USD", "CHF"]}}, ["amount", "from", "to"]),
    _tool("set_light", "Sets a light.", {
        "room": {"enum": ["kitchen", "hall"]}, "level": {**NUMBER, "minimum": 0, "maximum": 1}, "color": {
            "type": "array", "items": {**WHOLE, "minimum": 0, "maximum": 255}, "minItems": 3, "maxItems": 3}},
        ["room"]),
    _tool("find_route", "Finds a route.", {"start": STRING, "end": STRING, "via": STRINGS, "options": {
        "type": "object", "properties": {"avoids_tolls": FLAG, "by": {"enum": ["car", "foot", "train"]}}}},
        ["start", "end"]),
    _tool("write_file", "Writes a text to a file.", {"path": STRING, "text": TEXT}, ["path", "text"]),
    _tool("query_table", "Reads rows of a table.", {"table": STRING, "columns": STRINGS, "where": {
        "anyOf": [{"type": "null"}, {"type": "object", "required": ["column", "value"], "properties": {
            "column": STRING, "value": {"anyOf": [STRING, NUMBER]}}}]}}, ["table"]),
    _tool("book_table", "Books a table in a restaurant.", {"people": {**WHOLE, "minimum": 1}, "time": {
        "type": "string", "pattern": "^[0-2][0-9]:[0-5][0-9]$"}}, ["people", "time"]),
]  # fmt: skip
QUESTIONS = (
    "How is the weather in Oslo?", "Tell Ann and Bob that I am late.", "What is 17 times 23?",
    "Who won the cup in 1998?",
    "Book a table for four at eight.", "Make the kitchen brighter.", "How do I get from Rome to Milan by train?",
    "What time is it?", "How many francs are 100 dollars?", "Write a poem about the sea into poem.txt.",
    "Which customers live in Bern?", "Plan a meeting with Carla on Monday.", "Say hello.", "Tell me a long story.",
)  # fmt: skip


def ask_for_calls(record: Record, seed: int, count: int, end_s: float) -> int:
    """Ask for `count` calls; those on record are kept. Returns how many are left when the time is over."""
    found: dict[str, Any] = record.content.setdefault("required", {})
    todo = [number for number in range(count) if str(number) not in found or found[str(number)].get("broken")]
    if not todo or time.monotonic() > end_s:
        return len(todo)
    file = pull(SMOLLM2, Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "tandem" / "test-models")
    config = f'[model]\npath = "{file}"\nchat_template = "{TEMPLATE}"\nserved_names = ["smollm2"]\n'
    flags = ("--mixed", "1", "--max-model-len", "4096", "--kv-memory", "128MiB")
    with running(*flags, config=config) as cluster, ThreadPoolExecutor(TOGETHER) as threads:
        for start in range(0, len(todo), TOGETHER):
            if time.monotonic() > end_s:
                return len(todo) - start
            batch = todo[start : start + TOGETHER]
            outcomes = threads.map(lambda number: _outcome(cluster, seed, number), batch)
            found |= {str(number): one for number, one in zip(batch, outcomes, strict=True)}
            record.save()
    print(f"required: {sum('broken' not in one for one in found.values())} of {len(found)} are calls", flush=True)
    return 0


def _outcome(cluster: Cluster, seed: int, number: int) -> dict[str, Any]:
    """Tools, tokens and calls of one answer; `broken`: its fault."""
    rng = random.Random(f"{seed} required {number}")
    tools = rng.sample(TOOLS, rng.randint(1, 4))
    body = {
        "model": "smollm2", "messages": [{"role": "user", "content": rng.choice(QUESTIONS)}], "tools": tools,
        "tool_choice": "required", "max_tokens": MOST_TOKENS, "temperature": rng.choice((0, 0.8, 1)), "seed": number,
        "parallel_tool_calls": rng.random() < 0.2,
    }  # fmt: skip
    response = httpx.post(f"{cluster.api}/v1/chat/completions", json=body, timeout=600)
    if response.status_code != 200:
        return {"broken": f"{response.status_code}: {response.text[:300]}"}
    answer = response.json()
    choice = answer["choices"][0]
    calls = choice["message"].get("tool_calls") or []
    found = {"tokens": answer["usage"]["completion_tokens"], "calls": len(calls)}
    wrong = wrong_calls(calls, tools, choice["finish_reason"])
    return {**found, "broken": wrong} if wrong else found


def wrong_calls(calls: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], finish: str) -> str:
    """Return the first fault in the calls of an answer that had to call a tool; "" = none."""
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    if finish != "tool_calls" or not calls:
        return f"it ended with {finish}: {json.dumps(calls)[-500:]}"
    for call in calls:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        if name not in schemas:
            return f"there is no tool {name}"
        try:
            value = json.loads(arguments)
        except ValueError as error:
            return f"{name}: {error}: {arguments[-200:]}"
        if not jsonschema_rs.is_valid(schemas[name], value):
            return f"{name}: its schema does not allow {arguments[:300]}"
    return ""
