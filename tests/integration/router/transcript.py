"""Client answers in forms that can be compared, over HTTP and gRPC."""

import json
from dataclasses import dataclass, field
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


@dataclass
class Choice:
    """Everything about one choice, put together; `roles` and `finishes` count how often they were sent."""

    text: str = ""
    thought: str = ""
    logprobs: list[Any] = field(default_factory=list)
    roles: int = 0
    finishes: list[str] = field(default_factory=list)


@dataclass
class Transcript:
    """`cached_tokens` is left out of `usages`: it may differ from run to run."""

    choices: dict[int, Choice] = field(default_factory=dict)
    usages: list[dict[str, Any]] = field(default_factory=list)
    errors: list[dict[str, Any]] = field(default_factory=list)
    dones: int = 0

    @property
    def is_well_formed(self) -> bool:
        """One end for every choice, one usage, no error, and at most one role."""
        ends = all(len(choice.finishes) == 1 and choice.roles <= 1 for choice in self.choices.values())
        return ends and len(self.usages) == 1 and not self.errors and bool(self.choices)


def read_stream(text: str) -> Transcript:
    """The server-sent events of a streamed completion or chat completion."""
    transcript = Transcript()
    for line in text.splitlines():
        if line == "data: [DONE]":
            transcript.dones += 1
        elif line.startswith("data: "):
            _add(transcript, json.loads(line[6:]))
    return transcript


def read_whole(body: dict[str, Any]) -> Transcript:
    transcript = Transcript(dones=1)
    _add(transcript, body)
    return transcript


def _add(transcript: Transcript, body: dict[str, Any]) -> None:
    if "error" in body:
        transcript.errors.append(body["error"])
    if body.get("usage"):
        usage = {key: value for key, value in body["usage"].items() if isinstance(value, int)}
        transcript.usages.append(usage)
    for part in body.get("choices", ()):
        choice = transcript.choices.setdefault(part["index"], Choice())
        said = part.get("delta") or part.get("message") or part
        choice.text += said.get("text") or said.get("content") or ""
        choice.thought += said.get("reasoning_content") or ""
        choice.roles += "role" in said
        if part.get("finish_reason"):
            choice.finishes.append(part["finish_reason"])
        choice.logprobs += _logprobs(part.get("logprobs"))


def _logprobs(logprobs: dict[str, Any] | None) -> list[Any]:
    """One entry a token, of either API."""
    if not logprobs:
        return []
    if "content" in logprobs:
        return list(logprobs["content"] or ())
    keys = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return list(zip(*(logprobs[key] for key in keys if logprobs.get(key) is not None), strict=True))
