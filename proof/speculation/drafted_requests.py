"""Seeded requests of many settings, each with a prediction that holds in part, or with text an answer may repeat."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from tests.integration.router.transcript import Transcript

Body = dict[str, Any]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1.0, "top_p": 0.9},
    "filtered": {"temperature": 0.7, "top_k": 20, "min_p": 0.05},
    "cold": {"temperature": 0.2},
    "n=3": {"temperature": 0.8, "n": 3},
    "logprobs": {"temperature": 0.4, "logprobs": True, "top_logprobs": 3},
    "penalties": {"temperature": 0.6, "frequency_penalty": 0.5, "presence_penalty": 0.2},
    "stop": {"temperature": 0, "stop": ["\n", "the "]},
    "min_tokens": {"temperature": 0, "min_tokens": 20, "ignore_eos": False},
    "bias": {"temperature": 0, "logit_bias": {"300": 2.0, "301": -3.0}},
    "grammar": {
        "temperature": 0.3,
        "ignore_eos": False,
        "response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA, "strict": False}},
    },
}
"""By name; `max_tokens` at the edge of blocks and of drafts is drawn for each request."""
TEXT = (
    "count the words of a list and return one value for each key in the file that is open or None if there is no such "
    "name a second line follows here with the same words again"
)
WORDS = tuple(TEXT.split())
MAX_TOKENS = (1, 2, 15, 16, 17, 40, 64, 97)


def request(seed: int, number: int) -> tuple[str, Body]:
    """The setting's name, and the body without drafts; a function of both numbers."""
    dice = random.Random(f"{seed} {number}")
    name = list(SETTINGS)[number % len(SETTINGS)]
    words = dice.choices(WORDS, k=dice.randrange(3, 30))
    text = " ".join(words * dice.choice((1, 1, 3)))
    body: Body = {
        "model": "tandem-tiny", "messages": [{"role": "user", "content": text}], "max_tokens": dice.choice(MAX_TOKENS),
        "seed": dice.randrange(1 << 30), "ignore_eos": True, "speculative": False, **SETTINGS[name],
    }  # fmt: skip
    body["max_tokens"] = max(body["max_tokens"], body.get("min_tokens", 1))
    if dice.random() < 0.5:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return name, body


def drafted(seed: int, number: int, body: Mapping[str, Any], answer: Transcript) -> Body:
    """The same request with drafts; `answer` is what it is without, of which a prediction is made.

    A quarter has none and copies the context alone; the others predict the answer, with words changed, left out or
    added, or other words.
    """
    dice = random.Random(f"drafts {seed} {number}")
    found = {**body, "speculative": True}
    kind = dice.randrange(4)
    if kind == 0:
        return found
    given = answer.choices[0].text.split(" ") if answer.choices else []  # an error has none
    words = given if kind < 3 else dice.choices(WORDS, k=40)
    share = dice.choice((0.0, 0.05, 0.3))
    changed: list[str] = []
    for word in words:
        if dice.random() >= share:
            changed.append(word)
        elif dice.random() < 0.5:
            changed += dice.choices(WORDS, k=dice.randrange(1, 4))
    text = " ".join(changed)
    return {**found, "prediction": {"type": "content", "content": text}} if text else found
