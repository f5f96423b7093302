"""One process that plays workers for a router that speaks HTTP to them: completions as events, a token every
`--step-ms` for all sequences of a worker, the first one after PREFILL_S. Prints its ports; the end of stdin ends it.

It sends what a server of the OpenAI API sends, in as many bytes, and does as little for it as `workers.py` does.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
from dataclasses import dataclass, field

import uvloop

PREFILL_S = 0.005
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
_LENGTH = b"content-length:"
_WORDS = (" the", " of", " serving", " block", " a", " prefill", " tokens", "ing")


@dataclass(slots=True, eq=False)
class _Answer:
    wire: _Wire
    number: int
    left: int
    prompt_tokens: int
    told: int = 0


@dataclass(slots=True)
class Worker:
    """Answers what comes to one port; all its sequences share one step."""

    step_s: float
    count: int = 0
    decoding: list[_Answer] = field(default_factory=list)
    is_stepping: bool = False
    step_at_s: float = 0.0

    def begin(self, wire: _Wire, body: bytes) -> None:
        asked = json.loads(body)
        self.count += 1
        answer = _Answer(wire, self.count, int(asked["max_tokens"]), len(asked["prompt"]) // 5)
        asyncio.get_running_loop().call_later(PREFILL_S, self._first, answer)

    def _first(self, answer: _Answer) -> None:
        answer.wire.say(_HEAD)
        self._tell(answer)
        if answer.left:
            self.decoding.append(answer)
            if not self.is_stepping:
                self.is_stepping = True
                loop = asyncio.get_running_loop()
                self.step_at_s = loop.time() + self.step_s
                loop.call_at(self.step_at_s, self._step)

    def _step(self) -> None:
        loop = asyncio.get_running_loop()
        for answer in self.decoding:
            self._tell(answer)
        self.decoding = [answer for answer in self.decoding if answer.left]
        self.is_stepping = bool(self.decoding)
        if self.is_stepping:
            self.step_at_s = max(loop.time(), self.step_at_s + self.step_s)
            loop.call_at(self.step_at_s, self._step)

    @staticmethod
    def _tell(answer: _Answer) -> None:
        answer.left -= 1
        answer.told += 1
        finish = '"length"' if not answer.left else "null"
        head = f'data: {{"id":"cmpl-{answer.number:032x}","object":"text_completion","created":1700000000,'
        text = _WORDS[answer.told % len(_WORDS)]
        event = (
            f'{head}"model":"tandem-tiny","choices":[{{"index":0,"text":"{text}","logprobs":null,'
            f'"finish_reason":{finish}}}],"usage":null}}\n\n'
        )
        if not answer.left:
            total = answer.prompt_tokens + answer.told
            event += (
                f'{head}"model":"tandem-tiny","choices":[],"usage":{{"prompt_tokens":{answer.prompt_tokens},'
                f'"completion_tokens":{answer.told},"total_tokens":{total}}}}}\n\ndata: [DONE]\n\n'
            )
        data = event.encode()
        answer.wire.say(b"%x\r\n%b\r\n" % (len(data), data) + (b"" if answer.left else b"0\r\n\r\n"))


class _Wire(asyncio.Protocol):
    """One connection: requests one after another."""

    def __init__(self, worker: Worker) -> None:
        self._worker, self._data = worker, b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, found, rest = self._data.partition(b"\r\n\r\n")
        if not found:
            return
        lines = head.lower().split(b"\r\n")
        length = next((int(line[len(_LENGTH) :]) for line in lines if line.startswith(_LENGTH)), 0)
        if len(rest) < length:
            return
        self._data = rest[length:]
        if head.startswith(b"POST /v1/completions "):
            self._worker.begin(self, rest[:length])
        else:  # health, and what a router asks about a model
            self.say(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}")

    def say(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)


async def _run(count: int, step_ms: float) -> None:
    loop, ports = asyncio.get_running_loop(), []
    for _ in range(count):
        worker = Worker(step_ms / 1000)
        server = await loop.create_server(lambda worker=worker: _Wire(worker), "127.0.0.1", 0)  # type: ignore[misc]
        ports.append(server.sockets[0].getsockname()[1])
    print(json.dumps(ports), flush=True)
    gc.disable()  # pauses here would count as the router's
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.router.http_workers", description=__doc__)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--step-ms", type=float, required=True)
    arguments = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(arguments.workers, arguments.step_ms))
    return 0


if __name__ == "__main__":
    sys.exit(main())
