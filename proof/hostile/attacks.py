"""Hostile clients, in a process of their own: what is just below each bound, with a key, without one, and slowly.

`python -m proof.hostile.attacks --api URL --grpc ADDRESS --seed N --seconds N` draws from all attacks in turns, at a
pace; the key of the hostile tenant is the first line of stdin. It writes one JSON object to stdout: attack and answer,
with how often.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import socket
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from urllib.parse import urlsplit

import grpc

from tandem.rpc.v1 import inference_pb2 as i
from tandem.rpc.v1 import inference_pb2_grpc

MODEL = "tandem-tiny"
IN_LOOP_BYTES = 250 * 1024
"""Size of a body that the router still parses on its event loop."""
BODY_BYTES = (4 << 20) - 4096
GRPC_BYTES = (4 << 20) - 4096
FILE_BYTES = 4 << 20
ANSWER_S = 60.0
SLOW_SOCKETS = 16


@dataclass(slots=True)
class Attacker:
    """Sends attacks to one router and counts the answers."""

    host: str
    port: int
    grpc_address: str
    key: str
    dice: Random
    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)
    slow: collections.deque[socket.socket] = field(default_factory=collections.deque)

    # ---- bodies ----------------------------------------------------------------------------------------------------

    def wrong_elements(self) -> str:
        """A list with elements that it may not hold."""
        path, start, element, end = self.dice.choice(WRONG)
        return self.post(path, filled(start, element, end, self.dice.choice((IN_LOOP_BYTES, BODY_BYTES))))

    def deep(self) -> str:
        levels = self.dice.choice((200, 254, 255, 1000, 50_000))
        path, name = self.dice.choice((
            ("/v1/chat/completions", "metadata"), ("/v1/chat/completions", "chat_template_kwargs"),
            ("/v1/completions", "prompt"), ("/v1/responses", "metadata"), ("/tokenize", "prompt"),
            ("/v1/messages", "cache_control"), ("/v1/messages/count_tokens", "system"),
        ))  # fmt: skip
        start = f'{{"model":"{MODEL}","messages":[{{"role":"user","content":"hi"}}],"input":"hi","{name}":'
        return self.post(path, start.encode() + b"[" * levels + b"]" * levels + b"}")

    def wide(self) -> str:
        """Very many names."""
        path = self.dice.choice((
            "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/tokenize",
        ))  # fmt: skip
        size = self.dice.choice((IN_LOOP_BYTES, BODY_BYTES))
        fields: list[str] = []
        while size > 0:
            fields.append(f'"x{len(fields)}":0')
            size -= len(fields[-1]) + 1
        inside = ",".join(fields)
        where = self.dice.choice((f'"metadata":{{{inside}}}', f'"logit_bias":{{{inside}}}', inside))
        return self.post(path, f'{{"model":"{MODEL}","input":"hi","prompt":"hi",{where}}}'.encode())

    def template(self) -> str:
        """A body that a chat template would have to walk."""
        size = self.dice.choice((15_000, IN_LOOP_BYTES, BODY_BYTES))
        start = f'{{"model":"{MODEL}","messages":[{{"role":"user","content":"hi"}}],"chat_template_kwargs":{{"a":['
        return self.post("/v1/chat/completions", filled(start, "[],[]", "]}}", size))

    def many_messages(self) -> str:
        start = f'{{"model":"{MODEL}","max_tokens":1,"messages":['
        return self.post("/v1/chat/completions", filled(start, '{"role":"user","content":"a"}', "]}", BODY_BYTES))

    def long_text(self) -> str:
        """A prompt that is longer than any context."""
        body = {"model": MODEL, "max_tokens": 1, "prompt": self.dice.choice("aé€") * (BODY_BYTES // 4)}
        return self.post("/v1/completions", json.dumps(body, ensure_ascii=False).encode())

    def logprobs(self) -> str:
        """An answer with as many log-probabilities as may be asked for."""
        body = {
            "model": MODEL, "messages": [{"role": "user", "content": "hi"}],
            "n": 16, "max_tokens": self.dice.choice((64, 1000, 100_000)),
            "logprobs": True, "top_logprobs": 20, "ignore_eos": True,
        }  # fmt: skip
        return self.post("/v1/chat/completions", json.dumps(body).encode())

    # ---- what is kept ----------------------------------------------------------------------------------------------

    def kept_response(self) -> str:
        """A stored response as large as it can be."""
        field_name = self.dice.choice(("user", "safety_identifier", "input"))
        body = {"model": MODEL, "input": "hi", "max_output_tokens": 1, "store": True, field_name: "a" * BODY_BYTES}
        return self.post("/v1/responses", json.dumps(body).encode())

    def file(self) -> str:
        return self.upload(b"a" * FILE_BYTES)[0]

    def poisoned_batch(self) -> str:
        """Lines with bodies nested as deep as a parser takes."""
        levels = self.dice.choice((200, 255, 1000))
        nested = "[" * levels + "]" * levels
        lines = [
            f'{{"custom_id":"{n}","method":"POST","url":"/v1/completions","body":{{"model":"{MODEL}","prompt":"hi",'
            f'"max_tokens":1,"metadata":{{"a":{nested}}}}}}}'
            for n in range(5)
        ]
        status, answer = self.upload("\n".join(lines).encode())
        if "id" not in answer:
            return status
        wish = {"input_file_id": answer["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        return self.post("/v1/batches", json.dumps(wish).encode())

    def upload(self, content: bytes) -> tuple[str, dict[str, str]]:
        edge = "hostile"
        form = (
            f'--{edge}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--{edge}\r\n'
            f'Content-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
        )
        body = form.encode() + content + f"\r\n--{edge}--\r\n".encode()
        status, answer = self.exchange("/v1/files", body, f"multipart/form-data; boundary={edge}")
        with contextlib.suppress(ValueError):
            return status, dict(json.loads(answer))
        return status, {}

    # ---- connections -----------------------------------------------------------------------------------------------

    def pipelined(self) -> str:
        """Without a key: as many requests as fit into one read."""
        line = self.dice.choice((b"GET / HTTP/1.1\r\n\r\n", b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n"))
        with self.connected() as sock, contextlib.suppress(ConnectionError):
            sock.sendall(line * (256_000 // len(line)))
            sock.shutdown(socket.SHUT_WR)
            return "closed" if not sock.recv(1 << 16) else "answered"
        return "closed"

    def sent_slowly(self) -> str:
        """Without a key: heads that never end, a byte more now and then, on some sockets at a time."""
        for sock in self.slow:
            with contextlib.suppress(OSError):
                sock.send(b"a")
        if len(self.slow) == SLOW_SOCKETS:
            self.slow.popleft().close()
        sock = self.connected()
        sock.send(b"POST /v1/completions HTTP/1.1\r\nX-Slow: ")
        self.slow.append(sock)
        return "held"

    def cut(self) -> str:
        """Half a body, then a reset."""
        with self.connected() as sock, contextlib.suppress(ConnectionError):
            sock.sendall(self.head("/v1/completions", BODY_BYTES, "application/json") + b'{"prompt":"' + b"a" * 100_000)
            reset(sock)
        return "cut"

    def left(self) -> str:
        """An answer that is begun and not read."""
        body = {"model": MODEL, "prompt": "hi", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        data = json.dumps(body).encode()
        with self.connected() as sock, contextlib.suppress(ConnectionError):
            sock.sendall(self.head("/v1/completions", len(data), "application/json") + data)
            sock.recv(1)
            reset(sock)
        return "left"

    # ---- gRPC ------------------------------------------------------------------------------------------------------

    def grpc_messages(self) -> str:
        """As many empty messages as a request can hold, with a key or without."""
        request = i.GenerateRequest(model=MODEL)
        request.chat.messages.extend([i.ChatMessage()] * (GRPC_BYTES // 2))
        metadata = (("authorization", f"Bearer {self.key}"),) if self.dice.random() < 0.5 else None
        options = [("grpc.enable_http_proxy", 0)]
        with grpc.insecure_channel(self.grpc_address, options=options) as channel:
            try:
                for _ in inference_pb2_grpc.InferenceStub(channel).Generate(
                    request, timeout=ANSWER_S, metadata=metadata
                ):
                    pass
            except grpc.RpcError as error:
                return str(error.code().name)
        return "OK"

    # ---- sending ---------------------------------------------------------------------------------------------------

    def post(self, path: str, body: bytes) -> str:
        return self.exchange(path, body, "application/json")[0]

    def exchange(self, path: str, body: bytes, kind: str) -> tuple[str, bytes]:
        """Status and content of the answer; a status of "closed" if there is none."""
        answer = bytearray()
        with self.connected() as sock, contextlib.suppress(ConnectionError):
            with contextlib.suppress(ConnectionError):  # it may be refused before all of it is sent
                sock.sendall(self.head(path, len(body), kind) + body)
            while part := sock.recv(1 << 16):
                answer += part
        first, _, rest = bytes(answer).partition(b"\r\n")
        words = first.split()
        return (words[1].decode() if len(words) > 1 else "closed"), rest.partition(b"\r\n\r\n")[2]

    def head(self, path: str, length: int, kind: str) -> bytes:
        return (
            f"POST {path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\nAuthorization: Bearer {self.key}\r\n"
            f"Content-Type: {kind}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
        ).encode()

    def connected(self) -> socket.socket:
        return socket.create_connection((self.host, self.port), timeout=ANSWER_S)


WRONG = (
    ("/v1/completions", f'{{"model":"{MODEL}","prompt":[', "{}", "]}"),
    ("/v1/completions", f'{{"model":"{MODEL}","prompt":[', "[[]]", "]}"),
    ("/v1/completions", f'{{"model":"{MODEL}","prompt":"hi","stop":[', "1", "]}"),
    ("/v1/chat/completions", f'{{"model":"{MODEL}","messages":[{{"role":"user","content":[', "{}", "]}]}"),
    ("/v1/chat/completions", f'{{"model":"{MODEL}","messages":[', "[]", "]}"),
    ("/v1/chat/completions", f'{{"model":"{MODEL}","messages":[{{"role":"user","content":"a"}}],"tools":[', "{}", "]}"),
    ("/v1/responses", f'{{"model":"{MODEL}","input":[', "{}", "]}"),
    ("/v1/responses", f'{{"model":"{MODEL}","input":"hi","tools":[', "1", "]}"),
    ("/v1/responses", f'{{"model":"{MODEL}","input":"hi","include":[', "{}", "]}"),
    ("/v1/messages", f'{{"model":"{MODEL}","messages":[{{"role":"user","content":[', "{}", "]}]}"),
    ("/v1/messages", f'{{"model":"{MODEL}","messages":[{{"role":"user","content":"a"}}],"tools":[', "{}", "]}"),
    ("/v1/messages/count_tokens", f'{{"model":"{MODEL}","messages":[', "[]", "]}"),
    ("/tokenize", f'{{"model":"{MODEL}","messages":[', "1", "]}"),
)  # fmt: skip
"""Path, begin, element and end of bodies with one list that has nothing right in it."""


def attacks(attacker: Attacker) -> dict[str, Callable[[], str]]:
    """All of them, by name."""
    each = (
        attacker.wrong_elements, attacker.deep, attacker.wide, attacker.template, attacker.many_messages,
        attacker.long_text, attacker.logprobs, attacker.kept_response, attacker.file, attacker.poisoned_batch,
        attacker.pipelined, attacker.sent_slowly, attacker.cut, attacker.left, attacker.grpc_messages,
    )  # fmt: skip
    return {attack.__name__: attack for attack in each}


def filled(start: str, element: str, end: str, size: int) -> bytes:
    """A body with as many elements as fit into `size` bytes."""
    count = (size - len(start) - len(end)) // (len(element) + 1)
    return f"{start}{','.join([element] * count)}{end}".encode()


def reset(sock: socket.socket) -> None:
    """Close it so that the other end gets an error, and no end of the stream."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m proof.hostile.attacks", description=__doc__)
    parser.add_argument("--api", required=True)
    parser.add_argument("--grpc", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--every-s", type=float, default=0.2, help="how long after one attack began the next may begin")
    arguments = parser.parse_args()
    where = urlsplit(arguments.api)
    attacker = Attacker(
        host=where.hostname or "", port=where.port or 80, grpc_address=arguments.grpc,
        key=sys.stdin.readline().strip(), dice=Random(arguments.seed),
    )  # fmt: skip
    known, ends_s = attacks(attacker), time.monotonic() + arguments.seconds
    while time.monotonic() < ends_s:
        for name in attacker.dice.sample(sorted(known), len(known)):
            begun_s = time.monotonic()
            if begun_s >= ends_s:
                break
            try:
                outcome = known[name]()
            except OSError as error:
                outcome = type(error).__name__
            attacker.outcomes[f"{name} {outcome}"] += 1
            time.sleep(max(0.0, begun_s + arguments.every_s - time.monotonic()))
    while attacker.slow:
        attacker.slow.pop().close()
    print(json.dumps(dict(sorted(attacker.outcomes.items()))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
