"""Clients that send a request and can leave whenever they like."""

import json
import socket
from collections.abc import Callable

import grpc

from tandem.rpc.v1 import inference_pb2 as i
from tandem.rpc.v1 import inference_pb2_grpc as i_grpc

WAYS = ("stream", "whole", "grpc")


def ask(
    http: str, grpc_address: str, way: str, prompt: str | list[int], *, max_tokens: int, model: str = "tiny"
) -> Callable[[], None]:
    """Send a request to a router at `http` and `grpc_address` (host:port); returns what makes its client leave."""
    if way == "grpc":
        return _call(grpc_address, prompt, max_tokens, model)
    body = json.dumps(
        {"model": model, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": way == "stream"}
    ).encode()
    host, _, port = http.rpartition(":")
    connection = socket.create_connection((host, int(port)))
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection.close


def _call(address: str, prompt: str | list[int], max_tokens: int, model: str) -> Callable[[], None]:
    channel = grpc.insecure_channel(address)
    sampling = i.GenerateSampling(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    text = {"text": prompt} if isinstance(prompt, str) else {"token_ids": i.TokenIds(ids=prompt)}
    call = i_grpc.InferenceStub(channel).Generate(i.GenerateRequest(model=model, sampling=sampling, **text))

    def cancel() -> None:
        call.cancel()  # type: ignore[no-untyped-call]
        channel.close()

    return cancel
