"""Prompts that share prefixes, asked of any router; every answer of a simulated engine is held against the oracle."""

import http.client
import json
import random
import threading
import urllib.error
import urllib.request
from typing import Any

from tokenizers import Tokenizer

from tandem.engine.sim.arithmetic import expected_tokens
from tests.integration.worker.pair import MODEL

FAMILIES, FAMILY_TOKENS = 24, 320
ANSWER_TOKENS = 6
NO_ANSWER = (OSError, http.client.HTTPException, ValueError)


class SharedPrompts:
    """Used by many threads at once. `wrong` lists the answers that were not as expected."""

    def __init__(self) -> None:
        self._tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
        self._lock = threading.Lock()
        self.wrong: list[str] = []

    def prompt(self, rng: random.Random, questions: random.Random | None = None) -> list[int]:
        """A part of one of the families, most of it from the first few, and a question of its own.

        `rng` draws family and lengths, and without `questions` the question too.
        """
        family = min(int(rng.expovariate(0.25)), FAMILIES - 1)
        shared = [(7919 * family + 31 * k * k + k) % 3000 + 600 for k in range(rng.randrange(32, FAMILY_TOKENS))]
        length, questions = rng.randrange(1, 40), questions or rng
        return [*shared, *(questions.randrange(600, 3600) for _ in range(length))]

    def ask(self, api: str, prompt: list[int]) -> tuple[int, dict[str, Any]]:
        """(status, timing); 0 = no answer. What comes with status 200 is compared with the oracle."""
        body = {"model": "tandem-tiny", "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0}
        headers = {"Content-Type": "application/json", "X-Tandem-Timing": "1"}
        request = urllib.request.Request(f"{api}/v1/completions", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                text = json.load(response)["choices"][0]["text"]
                timing = dict(json.loads(response.headers["x-tandem-timing"]))
        except urllib.error.HTTPError as error:
            with error:
                return error.code, {}
        except NO_ANSWER:
            return 0, {}
        expected = self._tokenizer.decode(expected_tokens(prompt, ANSWER_TOKENS, 4096, eos_token_ids=(1,)))
        if text != expected:
            with self._lock:
                self.wrong.append(f"{text!r} instead of {expected!r}")
        return 200, timing
