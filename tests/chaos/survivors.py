"""Clients of a real cluster with workers that are struck while answers run, and the answers that they must get
anyway."""

import http.client
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from tests.integration.router.transcript import Transcript, read_stream, read_whole
from tools.running_cluster import Cluster, is_free
from tools.waiting import wait_for

Bodies = dict[str, dict[str, Any]]
ANSWER_S = 240.0
"""Until an answer is taken for one that hangs, on a machine on which it takes 20 times as long as on a quiet one."""
HEAR_OF_IT_S = 15.0
"""Until clients learn of a lost worker, where no request waits for it, on a machine with much else to do."""
STREAM: dict[str, Any] = {"model": "tandem-tiny", "stream": True, "stream_options": {"include_usage": True}}


def asks(max_tokens: int, prompt_tokens: int, salt: int = 0) -> Bodies:
    """One request of every kind; their prompts differ, also by `salt`."""

    def prompt(number: int) -> list[int]:
        return [(13 * k + 101 * number + 997 * salt) % 3000 + 600 for k in range(prompt_tokens + number)]

    plain: dict[str, Any] = {**STREAM, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    words = " ".join(f"word {k + salt}" for k in range(prompt_tokens // 4))
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("greedy", {}),
        ("seeded", {"temperature": 1.1, "seed": 17 + salt}),
        ("n=2", {"n": 2, "temperature": 0.9, "seed": 5 + salt}),
        ("logprobs", {"logprobs": 3}),
        ("penalties", {"frequency_penalty": 0.6, "presence_penalty": 0.3, "temperature": 0.7, "seed": 2}),
    ]
    every = {kind: {**plain, "prompt": prompt(number), **more} for number, (kind, more) in enumerate(kinds)}
    every["chat"] = {**plain, "messages": [{"role": "user", "content": words}], "logprobs": True, "top_logprobs": 2}
    whole = {key: value for key, value in every["n=2"].items() if not key.startswith("stream")}
    every["whole"] = {**whole, "prompt": prompt(len(kinds)), "seed": 8 + salt, "logprobs": 1}
    return every


def long_answer(prompt_tokens: int, max_tokens: int) -> dict[str, Any]:
    """A request that is streamed and ends at its limit alone."""
    prompt = [(13 * k) % 900 + 600 for k in range(prompt_tokens)]
    return {"model": "tandem-tiny", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}


def with_stop(body: Mapping[str, Any], undisturbed: Transcript) -> dict[str, Any]:
    """The same, ended by a string three quarters into its answer."""
    text = undisturbed.choices[0].text
    at = len(text) * 3 // 4
    return {**body, "stop": [text[at : at + 6]]}


def asked_calmly(calm: Cluster, max_tokens: int, prompt_tokens: int, salt: int) -> tuple[Bodies, dict[str, Transcript]]:
    """Return requests of every kind, also with stop strings, and their answers from an undisturbed cluster."""
    bodies = asks(max_tokens, prompt_tokens, salt)
    right = undisturbed(calm, bodies)
    stops = {f"{kind}, stop": with_stop(bodies[kind], right[kind]) for kind in ("greedy", "n=2", "chat")}
    return bodies | stops, right | undisturbed(calm, stops)


class Client(threading.Thread):
    """One answer, read in a thread of its own. `events` come in a stream alone; `ended_s` on the monotonic clock."""

    def __init__(self, cluster: Cluster, body: Mapping[str, Any]) -> None:
        super().__init__(daemon=True)
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        headers = {"Content-Type": "application/json"}
        self._request = urllib.request.Request(f"{cluster.api}{path}", json.dumps(body).encode(), headers)
        self._read = read_stream if body.get("stream") else _read_whole
        self.events = 0
        self.ended_s = 0.0
        self._text: list[str] = []
        self.start()

    def run(self) -> None:
        try:
            with urllib.request.urlopen(self._request, timeout=ANSWER_S) as response:
                for raw in response:
                    self._text.append(raw.decode())
                    self.events += raw.startswith(b"data: ")
        except urllib.error.HTTPError as error:
            with error:
                self._text.append(f"data: {error.read().decode()}\n")
        except (http.client.HTTPException, OSError) as error:  # the router died
            if self._text and not self._text[-1].endswith("\n"):
                self._text.pop()  # half an event
            broken = {"error": {"code": "connection", "message": repr(error)}}
            self._text.append(f"data: {json.dumps(broken)}\n")
        self.ended_s = time.monotonic()

    def transcript(self) -> Transcript:
        """Return the answer, once all of it is here."""
        self.join(ANSWER_S)
        assert not self.is_alive(), "the answer hangs"
        return self._read("".join(self._text))


def _read_whole(text: str) -> Transcript:
    """An answer that is one JSON object; a failure was kept in the form of an event."""
    return read_stream(text) if text.startswith("data: ") else read_whole(json.loads(text))


def undisturbed(cluster: Cluster, bodies: Mapping[str, Mapping[str, Any]]) -> dict[str, Transcript]:
    """The right answers."""
    clients = {kind: Client(cluster, body) for kind, body in bodies.items()}
    answers = {kind: client.transcript() for kind, client in clients.items()}
    for kind, answer in answers.items():
        assert answer.is_well_formed, (kind, answer.errors)
    return answers


def check(clients: Mapping[str, Client], right: Mapping[str, Transcript]) -> None:
    """No client saw anything of it: the same answer, one role, one end a choice, one usage, one [DONE]."""
    for kind, client in clients.items():
        got = client.transcript()
        assert got.errors == [], (kind, got.errors)
        assert got.dones == 1, kind
        assert got.is_well_formed, (kind, got)
        assert got == right[kind], kind


def is_serving(cluster: Cluster) -> bool:
    """A short answer comes back whole."""
    body = {"model": "tandem-tiny", "prompt": "A list is", "max_tokens": 4, "ignore_eos": True}
    status, answer = cluster.post("/v1/completions", body)
    return status == 200 and answer["usage"]["completion_tokens"] == 4


def wait_whole(cluster: Cluster, workers: int) -> None:
    """All workers are connected and registered, and nothing is in flight or held."""

    def is_whole() -> bool:
        status = cluster.status()
        able = [w for w in status["workers"] if w["is_connected"] and w["is_registered"]]
        return len(able) == workers and status["is_ready"] and is_free(cluster)

    wait_for(is_whole, 60, "the cluster is whole and quiet")
