"""Texts that installed packages ship, as windows of tokens: prose, code, chats.

Prose is the descriptions (READMEs) in packages' metadata, code is modules' sources. Of chats the questions are here,
and the answers are those of the model itself in fp32, greedily.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import metadata
from pathlib import Path

from tandem.router.tokenization.tokenizer import Tokenizer

PROSE = ("fastapi", "hypothesis", "pydantic", "starlette", "uvicorn", "rich", "redis")
CODE = ("fastapi.routing", "starlette.routing", "jinja2.environment", "argparse", "heapq")
QUESTIONS = (
    "What is the capital of France?", "Explain why the sky is blue.", "Write a short poem about the sea.",
    "How do I reverse a list in Python?", "Give me three tips to sleep better.", "What is a prime number?",
    "Summarise the story of Romeo and Juliet.", "How does a bicycle stay upright?", "Name five animals of Africa.",
    "What is the difference between a virus and a bacterium?", "Write a polite email that declines a meeting.",
    "How do I boil an egg?", "What causes the seasons?", "Translate 'good morning' into Spanish.",
    "Who wrote Hamlet?", "What is photosynthesis?",
)  # fmt: skip
KINDS = ("prose", "code", "chat")

Answer = Callable[[Sequence[int]], list[int]]
"""The greedy continuation of a prompt."""


def windows(kind: str, tokenizer: Tokenizer, answer: Answer, size: int, count: int) -> list[list[int]]:
    """`count` windows of `size` tokens, or fewer where the texts end; whole documents follow each other."""
    ids: list[int] = []
    for piece in _pieces(kind, tokenizer, answer):
        ids += piece
        if len(ids) >= size * count:
            break
    return [ids[start : start + size] for start in range(0, min(len(ids), size * count) - size + 1, size)]


def _pieces(kind: str, tokenizer: Tokenizer, answer: Answer) -> Iterator[list[int]]:
    if kind == "prose":
        for name in PROSE:
            yield tokenizer.encode_now(str(metadata(name).json["description"]))
    elif kind == "code":
        for name in CODE:
            spec = importlib.util.find_spec(name)
            assert spec is not None
            assert spec.origin is not None
            yield tokenizer.encode_now(Path(spec.origin).read_text())
    else:
        for question in QUESTIONS:
            prompt = tokenizer.encode_now(tokenizer.render_chat([{"role": "user", "content": question}]))
            yield prompt + answer(prompt)
