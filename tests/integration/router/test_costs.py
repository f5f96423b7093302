"""Nothing that a client sends has the router stand or fills its memory: hostile bodies just below each bound."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.router.api.http.body_parser import FREE, LONG_BODY_BYTES, MAX_CONTAINERS, MAX_STRINGS
from tandem.router.api.http.openapi import OPERATIONS, Operation
from tandem.statestore.embedded_redis import PrivateRedis
from tests.plugins.costs import Cost

ROOT = Path(__file__).resolve().parents[3]
LARGEST = 4 << 20
NEEDED: dict[str, dict[str, Any]] = {
    "createChatCompletion": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "createCompletion": {"prompt": "a", "max_tokens": 1},
    "tokenize": {"messages": [{"role": "user", "content": "a"}]},
    "detokenize": {"tokens": [1]},
    "createResponse": {"input": "a", "max_output_tokens": 1, "store": False},
    "createMessage": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "countTokens": {"messages": [{"role": "user", "content": "a"}]},
    "createBatch": {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"},
}
TEXT = '"input":[{"role":"assistant","content":[{"type":"output_text","text":"",'
INSIDE: dict[str, list[tuple[str, str]]] = {
    "createChatCompletion": [
        ('"messages":[{"role":"user","content":', '}]'),
        ('"messages":[{"role":"assistant","tool_calls":', '}]'),
        ('"tools":[{"type":"function","function":{"name":"a","parameters":', '}}]'),
        ('"tools":[{"type":"custom","custom":{"name":"a","format":', '}}]'),
        ('"chat_template_kwargs":{"a":', '}'),
    ],
    "createMessage": [
        ('"messages":[{"role":"user","content":', '}]'),
        ('"messages":[{"role":"assistant","content":[{"type":"tool_use","id":"a","name":"b","input":', '}]}]'),
        ('"tools":[{"name":"a","input_schema":', '}]'),
    ],
    "createResponse": [
        ('"input":[{"role":"user","content":', '}]'),
        ('"input":[{"type":"reasoning","summary":', '}]'),
        ('"input":[{"type":"reasoning","summary":[],"content":', '}]'),
        ('"input":[{"type":"function_call","call_id":"a","name":"b","arguments":', '}]'),
        ('"input":[{"type":"function_call_output","call_id":"a","output":', '}]'),
        ('"tools":[{"type":"function","name":"a","parameters":', '}]'),
        ('"tools":[{"type":"custom","name":"a","format":', '}]'),
        ('"tool_choice":{"type":"allowed_tools","mode":"auto","tools":', '}'),
        (TEXT + '"annotations":', '}]}]'),
        (TEXT + '"annotations":[', ']}]}]'),
        (TEXT + '"logprobs":', '}]}]'),
        (TEXT + '"logprobs":[{"token":"a","logprob":1,"bytes":', '}]}]}]'),
        (TEXT + '"logprobs":[{"token":"a","logprob":1,"top_logprobs":', '}]}]}]'),
    ],
    "tokenize": [('"messages":[{"role":"user","content":', '}]'), ('"chat_template_kwargs":{"a":', '}')],
}  # fmt: skip
"""Where more than the fields themselves can be wrong."""
READS = [one for one in OPERATIONS if one.body is not None]


def wide(element: bytes, count: int) -> bytes:
    return b"[" + b",".join([element] * count) + b"]"


def filling(element: bytes, size: int) -> bytes:
    return wide(element, size // (len(element) + 1))


VALUES: dict[str, bytes] = {
    "objects": wide(b"{}", FREE),
    "lists": wide(b"[]", FREE),
    "objects between spaces": wide(b"{}" + b" " * 15, MAX_CONTAINERS - 10),
    "lists of numbers": wide(b"[1,22,333,444444]", MAX_CONTAINERS - 10),
    "objects with a field": wide(b'{"abcdefgh":1234}', MAX_CONTAINERS - 10),
    "parts": wide(b'{"type":"text","text":""}', MAX_CONTAINERS - 10),
    "thoughts": wide(b'{"type":"reasoning_text","text":""}', MAX_CONTAINERS - 10),
    "items of thoughts": wide(b'{"type":"reasoning","summary":[]}', MAX_CONTAINERS // 2 - 10),
    "tools": wide(b'{"type":"function","name":"a"}', MAX_CONTAINERS - 10),
    "calls": wide(b'{"type":"function_call","call_id":"a"}', MAX_CONTAINERS - 10),
    "outputs": wide(b'{"type":"function_call_output","call_id":"a","output":[]}', MAX_CONTAINERS // 2 - 10),
    "log-probabilities": wide(b'{"token":"a","bytes":[],"logprob":-1}', MAX_CONTAINERS // 2 - 10),
    "texts": wide(b'""', 2 * FREE),
    "short texts": wide(b'"abc"', MAX_STRINGS - 100),
    "numbers": wide(b"1", LARGEST * 3 // 16 - 10),
    "fractions": wide(b"1.5", LARGEST * 3 // 16 - 10),
    "numbers and an object": wide(b"1", LARGEST * 3 // 16 - 10)[:-1] + b",{}]",
    "a map": b"{" + b",".join(b'"%d":1' % n for n in range(100_000, 100_000 + MAX_STRINGS - 100)) + b"}",
    "deep lists": b"[" * 1000 + b"]" * 1000,
    "deep objects": b'{"a":' * 1000 + b"1" + b"}" * 1000,
    "a text": b'"' + b"a" * (LARGEST - 1000) + b'"',
    "brackets in a text": b'"' + b"{[," * ((LARGEST - 1000) // 3) + b'"',
    "escaped quotes": b'"' + b'\\"' * ((LARGEST - 1000) // 2) + b'"',
    "a wide text": '"{}"'.format("a" * (LARGEST - 1000) + "\U0001f600").encode(),
}
"""Values that may stand in place of another type, up to each bound of a whole body."""
for _element in (b"{}", b"[]", b'""', b"1", b"1.5", b'"a"', b'{"a":{}}'):
    _name = _element.decode()
    VALUES[f"256 KiB of {_name}"] = filling(_element, LONG_BODY_BYTES - 1000)
    VALUES[f"4 MiB of {_name}"] = filling(_element, LARGEST - 1000)


def bodies(one: Operation, value: bytes) -> Iterator[bytes]:
    """Yield bodies of this operation: `value` in place of each field that holds more than a number, of an unknown
    field, and inside of a message."""
    assert one.body is not None
    kept = {"model": "tiny", **NEEDED[one.name]} if "model" in one.body.model_fields else NEEDED[one.name]
    names = [name for name, field in one.body.model_fields.items() if "list" in str(field.annotation) + name
             or "dict" in str(field.annotation) or "Options" in str(field.annotation)]  # fmt: skip
    for name in (*names, "user", "tools", "nonsense"):
        rest = json.dumps({key: given for key, given in kept.items() if key != name}).encode()
        yield rest[:-1] + b',"' + name.encode() + b'":' + value + b"}"
    for before, behind in INSIDE.get(one.name, ()):
        field = before.partition('"')[2].partition('"')[0]
        rest = json.dumps({key: given for key, given in kept.items() if key != field}).encode()
        yield rest[:-1] + b"," + before.encode() + value + behind.encode() + b"}"


class Router:
    """A test router in a process of its own: memory left by other tests in this one is not part of a body's cost."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._requests, self._answers = process.stdin, process.stdout

    def check(self, path: str, body: bytes) -> int:
        """The status; AssertionError if the body costs too much."""
        self._requests.write(f"{path} {len(body)}\n".encode() + body)
        self._requests.flush()
        said = json.loads(self._answers.readline())
        status, cost = int(said.pop("status")), Cost(**said)
        if status == 200:  # all of it was in order
            cost.check_turn()
        else:
            assert 400 <= status < 500
            cost.check_refusal(len(body))
        return status


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory, redis: PrivateRedis) -> Iterator[Router]:
    folder = tmp_path_factory.mktemp("router")
    command = [sys.executable, "-m", "tests.integration.router.costs_program", redis.url, str(folder)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield Router(process)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 0


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("one", READS, ids=lambda one: one.name)
def test_a_body_up_to_each_bound_costs_little(router: Router, one: Operation, value: str) -> None:
    sent = 0
    for body in bodies(one, VALUES[value]):
        if len(body) > LARGEST:
            continue
        router.check(one.path, body)
        sent += 1
    assert sent


def test_a_map_of_fields_nobody_knows_costs_little(router: Router) -> None:
    fields = b",".join(b'"x%d":1' % n for n in range(LARGEST // 12))
    for one in READS:
        body = b"{" + fields[: 250_000 if one.name == "tokenize" else LARGEST].rpartition(b",")[0] + b"}"
        assert router.check(one.path, body) == 400
