"""Slots of a step's tokens, by tensors and without."""

import random

import torch

from tandem.engine.runner_protocol import SeqSlice, StepBatch
from tandem.engine.step_tensors import build_step

SIZES = (16, 4)
"""Tokens of a block in each of two groups."""


def _sequence(dice: random.Random, query: int) -> tuple[SeqSlice, list[int]]:
    context = dice.randrange(query, 70)
    tables = tuple([dice.randrange(1, 500) for _ in range(-(-context // size))] for size in SIZES)
    return SeqSlice(query, context, tables), list(range(context - query, context))


def test_slots_are_of_the_block_of_each_token() -> None:
    """The same for decodes alone, which need no tensors for it, and for decodes beside a chunk."""
    dice, cpu = random.Random(5), torch.device("cpu")
    for _ in range(50):
        parts = [_sequence(dice, 1) for _ in range(dice.randrange(1, 6))]
        chunk = _sequence(dice, dice.randrange(2, 20))
        for some in (parts, [*parts, chunk]):
            positions = [place for _, places in some for place in places]
            batch = StepBatch([7] * len(positions), positions, [one for one, _ in some], [len(positions) - 1])
            step = build_step(batch, SIZES, cpu)
            for group, size in enumerate(SIZES):
                wanted = [
                    one.block_tables[group][place // size] * size + place % size
                    for one, places in some
                    for place in places
                ]
                assert step.slots[group].dtype is torch.int64
                assert step.slots[group].tolist() == wanted
            assert step.token_ids.tolist() == batch.token_ids
            assert step.positions.tolist() == positions
