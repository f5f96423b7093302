"""Requests for the bundled model, and the answers of an engine."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tandem.core.block_hash import BlockHash
from tandem.core.sampling import SamplingParams
from tandem.engine.engine import Engine
from tandem.engine.request import EngineRequest, RequestKind, TokenOutput

MODEL = Path(__file__).resolve().parents[3] / "models" / "tandem-tiny"
ANSWER = 24


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return tuple(torch.randint(16, 2000, (length,), generator=generator).tolist())


def request(key: str, prompt: Sequence[int], **options: Any) -> EngineRequest:
    kind = options.pop("kind", RequestKind.FULL)
    sampling = SamplingParams(**({"max_tokens": ANSWER, "temperature": 0.0, "ignore_eos": True} | options))
    return EngineRequest(key=key, prompt=tuple(prompt), sampling=sampling, hash_root=BlockHash(bytes(16)), kind=kind)


@dataclass
class Answers:
    """All outputs by request and choice, the preempted requests, and the most outputs of one step.

    `cached`: prompt tokens of ended choices that were prefix hits.
    """

    outputs: dict[tuple[str, int], list[TokenOutput]] = field(default_factory=lambda: defaultdict(list))
    preempted: list[str] = field(default_factory=list)
    together: int = 0
    cached: int = 0

    def tokens(self, key: str, choice: int = 0) -> list[int]:
        return [output.token for output in self.outputs[key, choice]]

    def scored(self) -> dict[tuple[str, int], list[Any]]:
        """Every token with its log-probabilities."""
        return {place: [(one.token, one.logprob) for one in some] for place, some in self.outputs.items()}


def run(engine: Engine, *requests: EngineRequest) -> Answers:
    """Step until everything is answered, with a check after each step."""
    for one in requests:
        engine.add(one)
    answers = Answers()
    for _ in range(2000):
        if not engine.has_work:
            return answers
        result = engine.step()
        engine.scheduler.check_integrity()
        assert not result.failed
        answers.preempted += result.preempted
        answers.together = max(answers.together, len(result.outputs))
        for output in result.outputs:
            answers.outputs[output.key, output.choice].append(output)
            answers.cached += engine.cached_tokens(output.key) if output.finish is not None else 0
    raise AssertionError("still at work after 2000 steps")
