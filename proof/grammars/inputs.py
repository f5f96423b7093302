"""The inputs of the proof: `structured_outputs` of a request, each made of its number and a seed alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from proof.grammars.schema_recipes import SCHEMAS, Mutations
from proof.grammars.text_recipes import choice, document, gbnf, lark, pattern, tag

TEXTS = (lark, lark, gbnf, choice, tag, document, pattern, pattern)
SHARE_OF_TEXTS = 0.35
SHARE_OF_MUTATIONS = 0.2


@dataclass(frozen=True, slots=True)
class Input:
    """One input: its kind, and the value of the field `structured_outputs`."""

    kind: str
    body: dict[str, Any]


class Inputs:
    """All inputs of a seed. `sample`: schemas to mutate, as `make proof NAME=schemas` takes them."""

    def __init__(self, seed: int, sample: Path | None) -> None:
        self._seed = seed
        self._mutations = None if sample is None else Mutations(sample)

    def of(self, number: int) -> Input:
        """Input number so many."""
        random = Random(f"{self._seed} {number}")
        chance = random.random()
        if chance < SHARE_OF_TEXTS:
            make = random.choice(TEXTS)
            return Input(make.__name__, make(random))
        if chance < SHARE_OF_TEXTS + SHARE_OF_MUTATIONS and self._mutations is not None:
            return Input("mutation", {"json": self._mutations.of(random)})
        recipe = random.choice(SCHEMAS)
        return Input(recipe.__name__, {"json": recipe(random)})
