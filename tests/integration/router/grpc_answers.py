"""Asking over gRPC with the parameters that HTTP has, and putting the answer's pieces together."""

from __future__ import annotations

from typing import Any

import grpc

from tandem.rpc.v1 import generation_pb2 as g
from tandem.rpc.v1 import inference_pb2 as i
from tandem.rpc.v1 import inference_pb2_grpc as i_grpc

FINISHES = {g.FINISH_REASON_STOP: "stop", g.FINISH_REASON_LENGTH: "length"}
OF_REQUEST = ("stop", "include_stop_str_in_output", "echo", "cache_salt", "prompt_cache_key")
"""Parameters that are the request's own; all others are its sampling's."""


def completion(model: str, text: str, **fields: Any) -> i.GenerateRequest:
    """A request as `/v1/completions` has it."""
    of_request = {name: fields.pop(name) for name in OF_REQUEST if name in fields}
    if "logit_bias" in fields:
        fields["logit_bias"] = {int(token): bias for token, bias in fields["logit_bias"].items()}
    sampling = i.GenerateSampling(**fields)
    return i.GenerateRequest(model=model, text=text, sampling=sampling, return_prompt_token_ids=True, **of_request)


def responses(address: str, request: i.GenerateRequest) -> list[i.GenerateResponse]:
    """All that the router at `address` (host:port) answers."""
    with grpc.insecure_channel(address) as channel:
        return list(i_grpc.InferenceStub(channel).Generate(request, timeout=60))


class Whole:
    """The choices of an answer over gRPC, put together."""

    def __init__(self, responses: list[i.GenerateResponse]) -> None:
        count = 1 + max(delta.index for response in responses for delta in response.choices)
        self.texts, self.finishes = [""] * count, [""] * count
        self.tokens: list[list[int]] = [[] for _ in range(count)]
        self.logprobs: list[list[g.TokenLogprob]] = [[] for _ in range(count)]
        for response in responses:
            for delta in response.choices:
                self.texts[delta.index] += delta.text
                self.finishes[delta.index] += FINISHES.get(delta.finish, "")
                self.tokens[delta.index] += delta.token_ids
                self.logprobs[delta.index] += delta.logprobs
        self.usage, self.first = responses[-1].usage, responses[0]
