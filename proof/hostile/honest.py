"""Honest clients: streams of answers with every byte known, and the gaps between their tokens."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import time
from dataclasses import dataclass, field
from random import Random
from typing import Any

import grpc.aio
import httpx

from tandem.engine.sim.arithmetic import expected_tokens
from tandem.rpc.v1 import inference_pb2 as i
from tandem.rpc.v1 import inference_pb2_grpc

TOKENS = 48
PROMPT_TOKENS = 120
PROMPTS = 5
"""Prompts of each stream, one after the other and again: the answers over HTTP are compared with the first ones."""
VOCABULARY, EOS = 4096, (1,)
TIMEOUT_S = 120.0


@dataclass(slots=True)
class Seen:
    """Notes of the streams. `gaps_s`: between two events of an answer; `lost`: reasons of answers that are wrong."""

    gaps_s: list[float] = field(default_factory=list)
    answers: int = 0
    lost: list[str] = field(default_factory=list)

    def p99_s(self) -> float:
        """The 99th percentile of the gaps; infinite without any."""
        return sorted(self.gaps_s)[int(0.99 * (len(self.gaps_s) - 1))] if self.gaps_s else math.inf


class Streams:
    """Some streams over HTTP and one over gRPC, that run for a given time."""

    def __init__(self, api: str, grpc_address: str, key: str, seed: int, http_streams: int = 3) -> None:
        self._api, self._address, self._key = api, grpc_address, key
        self._seed, self._http_streams = seed, http_streams
        self._right: dict[tuple[int, int], str] = {}
        """Digest of the first answer to each prompt over HTTP."""

    async def run(self, seconds: float) -> Seen:
        """Send requests for that long, and wait for the last answers."""
        seen, ends_s = Seen(), time.monotonic() + seconds
        limits = httpx.Limits(max_keepalive_connections=self._http_streams)
        headers = {"Authorization": f"Bearer {self._key}"}
        async with (
            httpx.AsyncClient(base_url=self._api, headers=headers, timeout=TIMEOUT_S, limits=limits) as http,
            grpc.aio.insecure_channel(self._address, options=[("grpc.enable_http_proxy", 0)]) as channel,
        ):
            stub = inference_pb2_grpc.InferenceStub(channel)
            over_http = [self._stream(seen, ends_s, number, http, None) for number in range(self._http_streams)]
            await asyncio.gather(*over_http, self._stream(seen, ends_s, self._http_streams, http, stub))
        return seen

    async def _stream(
        self,
        seen: Seen,
        ends_s: float,
        stream: int,
        http: httpx.AsyncClient,
        stub: inference_pb2_grpc.InferenceStub | None,
    ) -> None:
        number = 0
        while time.monotonic() < ends_s:
            prompt = Random(f"{self._seed} {stream} {number % PROMPTS}").choices(range(600, 3600), k=PROMPT_TOKENS)
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    if stub is None:
                        await self._over_http(seen, http, prompt, (stream, number % PROMPTS))
                    else:
                        await self._over_grpc(seen, stub, prompt)
                seen.answers += 1
            except (httpx.HTTPError, grpc.aio.AioRpcError, _WrongError, TimeoutError) as error:
                seen.lost.append(f"stream {stream}, answer {number}: {type(error).__name__}: {error}")
            number += 1

    async def _over_http(self, seen: Seen, http: httpx.AsyncClient, prompt: list[int], which: tuple[int, int]) -> None:
        body = {
            "model": "tandem-tiny", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        text, used, last_s = hashlib.sha256(), 0, 0.0
        async with http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                raise _WrongError(f"status {response.status_code}: {(await response.aread())[:200]!r}")
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise _WrongError(str(event["error"]))
                used = (event.get("usage") or {}).get("completion_tokens", used)
                for choice in event["choices"]:
                    text.update(choice["text"].encode())
                    last_s = _note_gap(seen, last_s)
        if used != TOKENS:
            raise _WrongError(f"{used} of {TOKENS} tokens")
        digest = text.hexdigest()
        if self._right.setdefault(which, digest) != digest:
            raise _WrongError("another text than the first time")

    async def _over_grpc(self, seen: Seen, stub: inference_pb2_grpc.InferenceStub, prompt: list[int]) -> None:
        request = i.GenerateRequest(
            model="tandem-tiny", token_ids=i.TokenIds(ids=prompt),
            sampling=i.GenerateSampling(max_tokens=TOKENS, temperature=0, ignore_eos=True),
        )  # fmt: skip
        tokens: list[int] = []
        last_s = 0.0
        metadata = (("authorization", f"Bearer {self._key}"),)
        call: Any = stub.Generate(request, timeout=TIMEOUT_S, metadata=metadata)
        async for response in call:
            for delta in response.choices:
                tokens += delta.token_ids
                last_s = _note_gap(seen, last_s)
        if tokens != expected_tokens(prompt, TOKENS, VOCABULARY, eos_token_ids=EOS):
            raise _WrongError(f"other tokens than arithmetic says, {len(tokens)} of {TOKENS}")


class _WrongError(Exception):
    """An answer that differs from the right one."""


def _note_gap(seen: Seen, last_s: float) -> float:
    now_s = time.monotonic()
    if last_s:
        seen.gaps_s.append(now_s - last_s)
    return now_s
