"""One rank of simulated models: `python -m tests.integration.engine.sim_program FOLDER RANK SIZE HEADS:SPOILED …`.

Every rank is driven with the same steps; rank 0 compares with the oracle. For every number of KV heads in turn,
`SPOILED` is the rank with one wrong bit in its KV before the last step, -1 for none.
"""

import sys
from pathlib import Path

from tandem.engine.parallel import TensorGroup, open_group
from tandem.engine.runner_protocol import SeqSlice, StepBatch
from tandem.engine.sim.arithmetic import expected_tokens
from tandem.engine.sim.runner import SimRunner
from tests.unit.engine.simulation import EOS, VOCAB, layout, new_runner, prefill, prompt_of, say_again

TABLE = [5, 3, 9, 4, 7, 2]
PROMPT = prompt_of(19)
EXPECTED = expected_tokens(PROMPT, 4, VOCAB, eos_token_ids=EOS)


def check(group: TensorGroup, heads: int, spoiled: int) -> None:
    runner = new_runner(layout(heads=heads, tp=group.size), group=group)
    tokens = list(PROMPT)
    said = prefill(runner, tokens, (TABLE,)) if group.rank == 0 else follow(runner, tokens, 0)
    for number, token in enumerate(EXPECTED[:-1]):
        assert group.rank or said == token
        tokens.append(token)
        if number == len(EXPECTED) - 2 and group.rank == spoiled:
            runner.pool_bytes(0)[TABLE[1] * runner.layout.groups[0].block_bytes(group.size) + 1] ^= 1
        said = say_again(runner, tokens, (TABLE,)) if group.rank == 0 else follow(runner, tokens, len(tokens) - 1)
    assert group.rank or (said == EXPECTED[-1]) == (spoiled < 0), (heads, spoiled, said)


def follow(runner: SimRunner, tokens: list[int], start: int) -> int:
    """The same step as rank 0's, without anything to sample."""
    count = len(tokens) - start
    positions = list(range(start, len(tokens)))
    batch = StepBatch(tokens[start:], positions, [SeqSlice(count, len(tokens), (TABLE,))], [count - 1])
    assert runner.step(batch, []) == []
    return -1


if __name__ == "__main__":
    folder, rank, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    ranks = open_group(rank, size, device="cpu", rendezvous=folder / "meeting", timeout_s=60)
    for case in sys.argv[4:]:
        check(ranks, *(int(number) for number in case.split(":")))
    ranks.close()
