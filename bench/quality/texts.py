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
CALIBRATION_PROSE = (
    "numpy",
    "httpx",
    "pytest",
    "click",
    "typer",
    "transformers",
    "tokenizers",
    "huggingface_hub",
    "grpcio",
)
CALIBRATION_CODE = ("dataclasses", "http.client", "textwrap")
CALIBRATION_QUESTIONS = (
    "What is the tallest mountain on Earth?", "How do plants grow?", "Write a haiku about winter.",
    "Explain recursion to a child.", "What is the speed of light?", "Give me a recipe for pancakes.",
    "How do I sort a dictionary by value in Python?", "Why do cats purr?", "Tell me about the French Revolution.",
    "What is inflation?", "Write a thank-you note to a teacher.", "How does a microwave oven work?",
    "What are black holes?", "Name three rivers in Europe.", "How can I learn a language quickly?",
    "What is machine learning?", "Translate 'where is the station' into French.", "Who painted the Mona Lisa?",
    "Describe a rainy day.", "What is the difference between HTTP and HTTPS?",
)  # fmt: skip
"""Of the text that `--quantize-calibration` is given: nothing that is measured is in it."""

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


def calibration(tokenizer: Tokenizer, answer: Answer, count: int) -> str:
    """A text of about `count` tokens, a third of each kind, none of which `windows` has."""
    parts = []
    for some in (_prose(CALIBRATION_PROSE, tokenizer), _code(CALIBRATION_CODE, tokenizer),
                 _chats(CALIBRATION_QUESTIONS, tokenizer, answer)):  # fmt: skip
        ids: list[int] = []
        for piece in some:
            ids += piece
            if len(ids) >= count // len(KINDS):
                break
        parts.append(tokenizer.decode_all(ids[: count // len(KINDS)]))
    return "\n".join(parts)


def _pieces(kind: str, tokenizer: Tokenizer, answer: Answer) -> Iterator[list[int]]:
    if kind == "prose":
        return _prose(PROSE, tokenizer)
    return _code(CODE, tokenizer) if kind == "code" else _chats(QUESTIONS, tokenizer, answer)


def _prose(packages: Sequence[str], tokenizer: Tokenizer) -> Iterator[list[int]]:
    for name in packages:
        yield tokenizer.encode_now(str(metadata(name).json["description"]))


def _code(modules: Sequence[str], tokenizer: Tokenizer) -> Iterator[list[int]]:
    for name in modules:
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        yield tokenizer.encode_now(Path(spec.origin).read_text())


def _chats(questions: Sequence[str], tokenizer: Tokenizer, answer: Answer) -> Iterator[list[int]]:
    for question in questions:
        prompt = tokenizer.encode_now(tokenizer.render_chat([{"role": "user", "content": question}]))
        yield prompt + answer(prompt)
